"""Learner → engine: the transfer of weights, and its proof. See docs/sync.md."""
