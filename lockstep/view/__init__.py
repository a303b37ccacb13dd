"""The web page of `lockstep view`, served on this machine only: curves, rollouts, the sample funnel, settings and scores."""
