"""Block formats of four bits, fake-quantised linear layers, and the precision that a phase of a run computes in."""
