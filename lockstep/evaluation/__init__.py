"""Evaluation: its steps and conditions, intervals, and comparisons."""
