"""Settings: defined once in `schema`, loaded by `load`. Importing this package does not import torch."""
