"""The run directory, what is written into it, and where else numbers go. Importing this loads no torch."""
