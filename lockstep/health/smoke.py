"""The smoke gate: a table of a run's first steps, which shows at a glance whether anything is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.config.schema import Recipe
from lockstep.health.judge import Alarm
from lockstep.track.catalogue import all_metrics, applies, verdict
from lockstep.types import Metrics

COLUMNS = ("check", "metric", "lowest", "highest", "healthy", "verdict")


def smoke_rows(
    recipe: Recipe, rows: Sequence[tuple[int, Mapping[str, float]]], alarms: Sequence[Alarm]
) -> list[tuple[str, ...]]:
    """Return a row for each metric with a smoke label that the steps measured.

    Its verdict is the tier of a broken rule of `alarms`, else warn if most of its values are outside the healthy range, else ok.
    A value that is not a number is the lowest and the highest.
    """
    broken = {alarm.rule.metric: f"{alarm.setting.tier}: {alarm.rule.name}" for alarm in alarms}
    found = list[tuple[str, ...]]()
    for info in all_metrics():
        measured = [(step, metrics) for step, metrics in rows if info.name in metrics]
        if not info.smoke or not measured:
            continue
        healthy = recipe.health.ranges.get(info.name, info.healthy)
        outside = sum(
            applies(info.name, metrics) and verdict(info.name, metrics[info.name], step, recipe.health.ranges) == "warn"
            for step, metrics in measured
        )
        state = broken.get(info.name) or ("warn" if outside > len(measured) / 2 else "ok")
        values = [metrics[info.name] for _, metrics in measured]
        low, high = (f"{extreme(values):.4g}" for extreme in (np.min, np.max))
        found.append((info.smoke, info.name, low, high, str(healthy) if healthy else "–", state))
    return found


class SmokeGate:
    """Collects the first steps of a run. `due` returns the table once, after the last of them."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._rows: list[tuple[int, Metrics]] = []
        self._alarms: list[Alarm] = []

    def take(self, step: int, metrics: Mapping[str, float], alarms: Sequence[Alarm]) -> None:
        """Take in a step and the rules that it breaks."""
        if 0 < step <= self._recipe.health.smoke_steps:
            self._rows.append((step, dict(metrics)))
            self._alarms += alarms

    def due(self, step: int) -> list[tuple[str, ...]]:
        """Return the rows of the table if this step is the last of the gate, else nothing."""
        last = self._recipe.health.smoke_steps
        return smoke_rows(self._recipe, self._rows, self._alarms) if last and step == last else []
