"""Checkpoints: complete or absent, every byte checked before it is used. See docs/checkpoints.md."""
