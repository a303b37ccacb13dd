"""Tasks: training questions, held-out questions, and the grading of replies. One file per kind."""
