"""Games of OpenSpiel: single positions with one move to choose, and whole games."""
