"""Games of OpenSpiel: states to move in, and whole games."""
