"""The HTML report of a run, made only from the files of its run directory."""
