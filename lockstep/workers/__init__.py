"""Worker processes with limits on time and memory, which can be killed: for graders, comparisons, playouts and environments."""
