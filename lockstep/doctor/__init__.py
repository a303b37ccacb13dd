"""Checks of a machine, and of a recipe on it, before a run. Each check returns what it found, a verdict, and a fix."""
