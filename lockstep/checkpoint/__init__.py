"""Checkpoints: whole or not there, every byte checked before it is used. See docs/checkpoints.md."""
