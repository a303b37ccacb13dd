"""Adaptive quantisation noise: its schedule, the norms that get it, and its application and removal."""
