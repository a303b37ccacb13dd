"""The Python interface: recipes, training, evaluation and comparison as functions, and runs as data frames."""
