"""Exports a checkpoint as a folder that other programs load, and verifies that it is the trained model. See docs/export.md."""
