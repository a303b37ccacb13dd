"""Checks of a machine, and of a recipe on it, before a run: each says what it found, how that is, and what to do."""
