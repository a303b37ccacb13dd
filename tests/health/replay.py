"""Health rules applied to a series of metrics, as a run applies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockstep.config.schema import Recipe
from lockstep.health.judge import Alarm, HealthJudge


def replay(recipe: Recipe, rows: Iterable[tuple[int, Mapping[str, float]]], checkpoint_gib: float = 0.0) -> list[Alarm]:
    """Apply the rules to recorded steps, up to the first that stops the run."""
    judge, found = HealthJudge(recipe, checkpoint_gib), list[Alarm]()
    for step, metrics in rows:
        found += judge.step(step, metrics)
        if any(alarm.setting.tier == "stop" for alarm in found):
            break
    return found
