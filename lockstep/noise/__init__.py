"""Adaptive quantisation noise: its schedule, the norms that get it, and applying and removing it."""
