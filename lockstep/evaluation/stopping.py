"""Rules that stop a run early by its scores, and a check for training reward that rises while scores fall. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never

from lockstep.config.evaluate import Drops, NoStop, Plateau, Stop


@dataclass(frozen=True, slots=True)
class Point:
    """A metric's value after a number of trained steps."""

    step: int
    value: float


def should_stop(rule: Stop, points: Sequence[Point]) -> str:
    """Return why the run should stop after the last of its evaluations, oldest first; "" if it should continue."""
    match rule:
        case NoStop():
            return ""
        case Drops():
            return _drops(rule, points)
        case Plateau():
            return _plateau(rule, points)
        case _:
            assert_never(rule)


def smoothed(points: Sequence[Point], width: int) -> list[Point]:
    """Return the mean of each point and those before it, `width` in all; nothing before there are that many."""
    return [
        Point(points[i].step, statistics.fmean(point.value for point in points[i + 1 - width : i + 1]))
        for i in range(width - 1, len(points))
    ]


def best(points: Sequence[Point]) -> Point:
    """Return the highest point, the first of equal ones."""
    return max(points, key=lambda point: (point.value, -point.step))


def diverges(train: Sequence[Point], held_out: Sequence[Point], width: int = 3, least: float = 0.02) -> str:
    """Return why training and evaluation diverge; "" if they do not.

    They do if the training reward (the mean of its last `width` points up to the last evaluation) is at least `least` higher
    than when the held-out score was best, and the held-out score has fallen by at least as much since and again at its last
    evaluation. A held-out set of the training distribution alone may miss it.
    """
    if len(held_out) < 3:
        return ""
    top, last, before = best(held_out), held_out[-1], held_out[-2]
    then, now = level(train, top.step, width), level(train, last.step, width)
    if then is None or now is None or last.value > before.value - 1e-12 or last.step == top.step:
        return ""
    if now - then < least or top.value - last.value < least:
        return ""
    return (
        f"training and evaluation diverge: since step {top.step} the training reward went from {then:.3f} to {now:.3f}, the "
        f"held-out score from {100 * top.value:.1f} to {100 * last.value:.1f} %; the best weights may be those of step {top.step}"
    )


def level(points: Sequence[Point], step: int, width: int = 3) -> float | None:
    """Return the mean of the last `width` points up to `step`; before the first one, which is the base's rollouts, of the
    first.
    """
    found = [point.value for point in points if point.step <= step][-width:] or [
        point.value for point in points[:width]
    ]
    return statistics.fmean(found) if found else None


def _drops(rule: Drops, points: Sequence[Point]) -> str:
    if len(points) <= rule.in_a_row:
        return ""
    last = points[-rule.in_a_row - 1 :]
    falls = [after.value < before.value - rule.min_delta for before, after in pairwise(last)]
    if not all(falls):
        return ""
    way = ", ".join(f"{100 * point.value:.1f}" for point in last)
    top = best(points)
    return (
        f"{rule.metric} fell {rule.in_a_row} evaluations in a row ({way} % at steps {last[0].step} to {last[-1].step}); "
        f"it was highest at step {top.step} ({100 * top.value:.1f} %)"
    )


def _plateau(rule: Plateau, points: Sequence[Point]) -> str:
    means = smoothed(points, rule.smooth)
    if not means:
        return ""
    top, waited = means[0], 0
    for mean in means[1:]:
        if mean.value > top.value + rule.min_delta:
            top, waited = mean, 0
        else:
            waited += 1
    if waited < rule.patience:
        return ""
    return (
        f"the mean of {rule.smooth} evaluations of {rule.metric} has not risen by more than {100 * rule.min_delta:g} points "
        f"for {waited} evaluations ({100 * top.value:.1f} % at step {top.step}, now {100 * means[-1].value:.1f} %)"
    )
