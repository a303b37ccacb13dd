"""Runs on several workers of one machine: the driver has no model, each worker has all weights."""
