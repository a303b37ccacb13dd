"""Health rules: limits on the metrics of a run, checked after every step, which warn or stop the run."""
