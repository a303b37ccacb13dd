"""A page about runs, served on this machine alone: curves, rollouts, the sample funnel, settings and scores."""
