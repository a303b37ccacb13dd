"""Evaluation: its steps, conditions, estimates and intervals, and comparisons of scores."""
