"""The dictionary of metrics: meaning, unit, healthy range, and what to do outside it, from lockstep/config/metrics.yaml.

`verdict` judges one value by its absolute range, `drift` by the run's own past. docs/metrics.md is `metrics_markdown()`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from lockstep.config.metric import SOLVED, Drift, MetricInfo, Range, find, hint
from lockstep.config.metric import metrics as all_metrics
from lockstep.errors import ConfigError

__all__ = ["Judge", "all_metrics", "applies", "drift", "explain", "find", "healthy_text", "metrics_markdown", "verdict"]

LEAST = 5
"""Values that a median of recent ones is of."""

Verdict: TypeAlias = Literal["ok", "warn", ""]
"""warn: outside the healthy range, or not a finite number; "": there is no range to judge by."""


def explain(name: str) -> MetricInfo:
    """Return the metric of that name. Raises ConfigError with the nearest names if there is none."""
    info = find(name)
    if info is None:
        raise ConfigError([f"no such metric: {name}; {hint(name)}"], fix="`lockstep metrics list` shows all names")
    return info


def verdict(name: str, value: float, step: int | None = None, ranges: Mapping[str, Range] | None = None) -> Verdict:
    """Judge one value. Ranges that hold for the first steps only are judged up to that step, or if `step` is None.

    `ranges`, by metric, stand in place of the table's.
    """
    info, own = find(name), (ranges or {}).get(name)
    if (info or own) and not math.isfinite(value):
        return "warn"
    healthy = own or (info.healthy if info else None)
    if healthy is None or (step is not None and healthy.until is not None and step > healthy.until):
        return ""
    too_low = healthy.low is not None and (value < healthy.low or (healthy.open_low and value == healthy.low))
    too_high = healthy.high is not None and value > healthy.high
    return "warn" if too_low or too_high else "ok"


def drift(name: str, value: float, earlier: Sequence[float]) -> Verdict:
    """Judge one value against the run's earlier values of it, oldest first; "" while there are too few of them."""
    info = find(name)
    if info is None or info.drift is None or not math.isfinite(value):
        return ""
    base = baseline(info.drift, earlier)
    if base is None:
        return ""
    low, high = info.drift.low, info.drift.high
    outside = (low is not None and value < low * base) or (high is not None and value > high * base)
    return "warn" if outside else "ok"


def accuracies(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the accuracy of each mode that a step has evaluated."""
    parts = [(name.split("/"), value) for name, value in metrics.items()]
    return [(path[1], value) for path, value in parts if len(path) == 3 and path[0] == "eval" and path[2] == "accuracy"]


def applies(name: str, metrics: Mapping[str, float]) -> bool:
    """Return whether a metric's ranges and rules apply to a step: those of sameness do not if most replies are right."""
    info = find(name)
    return info is None or not info.unsolved or metrics.get("answer/correct", 0.0) < SOLVED


class Judge:
    """Judges a run's steps in order, by absolute range and by drift; it remembers what drift is measured against.

    `ranges`, by metric, stand in place of the table's (health.ranges).
    """

    def __init__(self, ranges: Mapping[str, Range] | None = None) -> None:
        self._ranges = ranges or {}
        self._earlier: dict[str, list[float]] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the names of the metrics that are outside."""
        outside: list[str] = []
        for name, value in metrics.items():
            earlier = self._earlier.get(name, [])
            if applies(name, metrics) and "warn" in (
                verdict(name, value, step, self._ranges),
                drift(name, value, earlier),
            ):
                outside.append(name)
            info = find(name)
            if info is not None and info.drift is not None and math.isfinite(value):
                self._earlier[name] = window(info.drift, [*earlier, value])
        return outside


def baseline(rule: Drift, earlier: Sequence[float]) -> float | None:
    """Return what a drifting metric is compared with; None while there are too few finite values."""
    values = [value for value in earlier if math.isfinite(value)]
    match rule.against:
        case "start":
            return statistics.fmean(values[: rule.steps]) if len(values) >= rule.steps else None
        case "recent":
            return statistics.median(values[-rule.steps :]) if len(values) >= LEAST else None


def window(rule: Drift, values: list[float]) -> list[float]:
    """Return those of all finite values so far that the rule's baseline needs."""
    return values[: rule.steps] if rule.against == "start" else values[-rule.steps :]


def metrics_markdown() -> str:
    """Return the page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every number that a run writes to `metrics.jsonl`, under these names and in these units, in all trackers too.",
        "A value outside its healthy range is marked `!` on the console and listed in `report.html`; no range here stops",
        "a run, the rules of [health](health.md) do. A range is a starting point, from the source named beside it: a task may",
        "have good reasons to leave it.",
        "",
        "This page is generated: `lockstep metrics list --markdown > docs/metrics.md`.",
    ]
    for group in dict.fromkeys(info.group for info in all_metrics()):
        lines += [
            "",
            f"## {group}",
            "",
            "| name | unit | meaning | healthy | when it is not |",
            "|---|---|---|---|---|",
        ]
        for info in (info for info in all_metrics() if info.group == group):
            cells = (f"`{info.name}`", info.unit, info.meaning, healthy_text(info), info.advice or "–")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def healthy_text(info: MetricInfo, own: Range | None = None) -> str:
    """Return the metric's ranges in words, with their sources; "–" if it has none. `own` is the recipe's (health.ranges)."""
    healthy = info.healthy if own is None else own.model_copy(update={"source": "health.ranges"})
    rules = [rule for rule in (healthy, info.drift) if rule is not None]
    text = "; ".join(f"{rule} ({rule.source})" for rule in rules) or "–"
    return f"{text}, while less than {SOLVED:.0%} of replies are correct" if info.unsolved else text
