"""Tasks: what is asked in training, what is held out, and how replies are graded. One file a kind."""
