"""Forecasts of a run before it is started: batches, memory, and the time that physics asks for."""
