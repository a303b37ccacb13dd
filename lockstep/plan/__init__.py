"""Forecasts of a run before it is started: batches, memory, disk, and a lower bound on its time."""
