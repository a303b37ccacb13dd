"""Processes that do work within limits and can be killed: graders, comparisons, playouts, sandboxes' hosts, environments."""
