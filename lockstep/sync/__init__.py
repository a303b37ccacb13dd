"""Transfer of weights from the learner to the engine, and its proof. See docs/sync.md."""
