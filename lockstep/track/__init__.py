"""The run directory, the files in it, and trackers of its metrics. Importing this package does not import torch."""
