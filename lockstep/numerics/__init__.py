"""Four-bit block formats, fake-quantised linear layers, and the precision of each phase of a run."""
