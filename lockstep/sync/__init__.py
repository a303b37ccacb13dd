"""Learner → engine: how weights get there, and the proof that they did. See docs/sync.md."""
