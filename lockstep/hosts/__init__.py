"""Spare machines over ssh: what a command needs is brought there by hash, and its results are fetched and checked."""
