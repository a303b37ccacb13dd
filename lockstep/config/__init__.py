"""Settings: defined once in `schema`, loaded by `load`. Importing this loads no torch."""
