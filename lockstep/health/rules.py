"""Numbers that scale the limits of health rules, and a line that names the rules in force. metrics.yaml defines the rules."""

from __future__ import annotations

from lockstep.config.metric import Drift, Tier
from lockstep.config.schema import Recipe

QUANTISED = 4.0
"""Factor for rollouts in four or eight bits: 0.095 against 0.015 to 0.03 nats (NeMo RL, FP8 against bf16)."""
MAGNIFIED = 10.0
"""Factor where activations have four bits: a learner and a GPU engine that hold the same weights differ by 0.41 nats instead of
0.018 (mxfp4-w4a4, a 1.5B model with random weights on an H200; benchmarks/results/gpu_numerics.txt)."""
DRIFTS = {"start": Drift(against="start", steps=5), "recent": Drift(against="recent", steps=50)}
"""Baselines of rules on the run's own past."""
SPARE_GIB = 0.25
"""Disk space to spare beside checkpoints: rollouts, scores and logs of the next steps."""

_OF_UPDATES = ("grad/", "weights/", "sync/", "memory/", "lr")
"""Metrics that a supervised run has too: it has no rewards and no rollouts."""
_VERBS: dict[Tier, str] = {"stop": "the run stops itself by", "warn": "warns of", "off": "does not look at"}


def health_lines(recipe: Recipe) -> list[str]:
    """Return a line that names the rules in force, for the log and `lockstep plan`."""
    tiers: dict[Tier, list[str]] = {"stop": [], "warn": [], "off": []}
    for rule, setting in recipe.health.in_force():
        own = rule.name in recipe.health.rules
        if recipe.loop == "rl" or own or rule.metric.startswith(_OF_UPDATES):
            tiers[setting.tier].append(rule.name)
    found = [f"{verb} {', '.join(tiers[tier])}" for tier, verb in _VERBS.items() if tiers[tier]]
    return [f"health: {'; '.join(found)}"]
