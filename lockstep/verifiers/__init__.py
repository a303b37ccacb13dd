"""Verifiers: each turns a prompt and a reply into a Grade. A bad answer never raises, and an error is never a reward of 0."""
