"""A run's own watch over its numbers: rules as data, and the judge that applies them step by step."""
