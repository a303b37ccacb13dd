"""Values of health rules over many steps: a falling reward, growing spikes, a reward that rises while held-out scores fall."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lockstep.config.schema import Recipe
from lockstep.evaluation.stopping import Point, best, level
from lockstep.types import Metrics

REWARD = "reward/mean"
WIDTH = 5
"""Steps at the start and at the end of which the mean rewards are compared."""
DECADE = 10
LEAST = 0.02
"""Smallest fall of reward or accuracy that counts."""
RISE = 0.005
"""Smallest rise of the training reward that counts while held-out questions are answered worse."""


class Trends:
    """Takes in a run's steps in order and returns the metrics of lockstep/config/metrics.yaml that nothing stores."""

    def __init__(self, recipe: Recipe) -> None:
        self._deciding = deciding(recipe)
        self._rewards: list[Point] = []
        self._norms: dict[int, float] = {}
        """Largest gradient norm by decade of steps."""
        self._scores: dict[str, list[tuple[Point, float]]] = {}
        """Accuracies with their standard errors, by name of the score."""

    def step(self, step: int, metrics: Mapping[str, float]) -> Metrics:
        """Take in a step; a number that cannot be told yet is absent."""
        found: Metrics = {}
        if (norm := metrics.get("grad/norm")) is not None and step:
            decade = (step - 1) // DECADE
            self._norms[decade] = max(self._norms.get(decade, 0.0), norm)
            if step % DECADE == 0 and (growth := escalation([self._norms.get(decade - i, 0.0) for i in (2, 1, 0)])):
                found["grad/escalation"] = growth
        if REWARD in metrics and step:
            self._rewards.append(Point(step, metrics[REWARD]))
            if (fall := drop([point.value for point in self._rewards])) is not None:
                found["reward/drop"] = fall
        falls = [self._divergence(name, step, metrics) for name in self._deciding if f"{name}/accuracy" in metrics]
        return found | ({"eval/divergence": max(falls)} if falls else {})

    def _divergence(self, name: str, step: int, metrics: Mapping[str, float]) -> float:
        now = Point(step, metrics[f"{name}/accuracy"])
        seen = self._scores.setdefault(name, [])
        seen.append((now, metrics.get(f"{name}/se", 0.0)))
        return divergence(seen, self._rewards)


def deciding(recipe: Recipe) -> list[str]:
    """Return the metrics' names, without their last part, of the held-out scores that decide. Example: eval/greedy"""
    return [f"eval/{name}" for name in recipe.eval.deciding]


def escalation(norms: Sequence[float]) -> float:
    """Return the smallest growth from one maximum to the next, 0 if one of those before is 0 or not finite."""
    pairs = list(pairwise(norms))
    if not pairs or any(before <= 0 or not math.isfinite(before) for before, _ in pairs):
        return 0.0
    return min(after / before for before, after in pairs)


def drop(rewards: Sequence[float]) -> float | None:
    """Return how many standard errors the last steps' mean reward is below that of the first; None while there are too few.

    The error is that of the step means themselves, so that it holds the chance of prompts and of replies.
    """
    if len(rewards) < 2 * WIDTH or not all(map(math.isfinite, (*rewards[:WIDTH], *rewards[-WIDTH:]))):
        return None
    rise, error = change(rewards)
    return -rise / max(error, 1e-3) if rise < -LEAST else 0.0


def change(rewards: Sequence[float]) -> tuple[float, float]:
    """Return how far the mean of the last steps is above that of the first, and its standard error."""
    first, last = rewards[:WIDTH], rewards[-WIDTH:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / WIDTH)
    return statistics.fmean(last) - statistics.fmean(first), error


def divergence(scores: Sequence[tuple[Point, float]], rewards: Sequence[Point]) -> float:
    """Return the fall of a held-out score since its best, over the least that counts, if the reward has risen since; else 0.

    `scores` are accuracies with their standard errors, oldest first.
    """
    top = best([point for point, _ in scores])
    now, error = scores[-1]
    top_error = next(se for point, se in scores if point == top)
    then, today = level(rewards, top.step), level(rewards, now.step)
    if then is None or today is None or today - then < RISE:
        return 0.0
    return (top.value - now.value) / max(LEAST, 2 * math.hypot(top_error, error))
