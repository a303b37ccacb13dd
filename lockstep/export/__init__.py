"""From a checkpoint to a folder that other programs load, proven to be the model that trained. See docs/export.md."""
