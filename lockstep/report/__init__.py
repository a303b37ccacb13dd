"""One page of a run, made from the files of its directory alone."""
