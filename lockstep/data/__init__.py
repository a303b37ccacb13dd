"""Prompts from files: reading with errors that name the row, splitting with proof of no overlap, hashing, ordering."""
