"""Data of a run's charts, for the HTML report and for `lockstep view`: which curves, and from which metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lockstep.config.metric import Range
from lockstep.report.gather import NamedScore, find_outside
from lockstep.track.catalogue import accuracies, find, healthy_text
from lockstep.track.writer import Event, StepRecord

Ranges: TypeAlias = Mapping[str, Range]


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of one or more metrics in one unit; pairs are (metric, label)."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]


CURVES = (
    Curve("Reward", "reward", (("reward/mean", "mean"), ("reward/p90", "90th percentile"))),
    Curve("Answers", "share of replies", (("answer/correct", "correct"), ("answer/boxed", "boxed"))),
    Curve("Response length", "tokens", (("length/mean", "mean"), ("length/max", "longest"))),
    Curve(
        "Truncated and unscored",
        "share of replies",
        (("length/truncated", "truncated"), ("reward/unscored", "unscored")),
    ),
    Curve("Groups without a difference", "share of groups", (("reward/zero_std_groups", "all rewards equal"),)),
    Curve("Entropy", "nats a token", (("entropy/sampled", "all replies"), ("entropy/mean", "trained tokens"))),
    Curve("Gradient norm before clipping", "", (("grad/norm", "norm"),)),
    Curve("Learning rate", "", (("lr", "lr"),)),
    Curve(
        "Rollout against learner", "nats", (("mismatch/mean_abs_dlogp", "mean |Δ log p|"), ("sync/probe_mean", "probe"))
    ),
    Curve("KL to the reference", "nats a token", (("kl/ref", "KL"),)),
    Curve("Loss of given replies", "nats a token", (("sft/loss", "training"), ("validation/loss", "validation"))),
    Curve("Policy loss", "", (("loss/policy", "policy loss"),)),
    Curve("Memory", "GiB", (("memory/rss_gib", "resident"), ("memory/gpu_gib", "GPU"))),
)
PHASES = ("rollout", "grade", "update", "sync", "validate", "evaluate", "save")
Point: TypeAlias = tuple[float | None, float | None, float | None]
"""A value and the ends of its interval."""
MARKED = {
    "warning": "warning",
    "health": "warning",
    "stopped": "warning",
    "checkpoint": "checkpoint",
    "resume": "resume",
}
"""Kinds of events that stand on the charts, each with the kind of its mark."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: a value a step, None for what is not finite. `low` and `high` are the ends of an interval, if there is one."""

    label: str
    x: tuple[int, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart; `healthy` are the ends of the first metric's healthy range, None where it is open."""

    title: str
    unit: str
    series: tuple[Series, ...]
    kind: Literal["lines", "stack"] = "lines"
    healthy: tuple[float | None, float | None] = (None, None)
    help: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step. Example: Mark(20, "checkpoint", "step_000020")"""

    step: int
    kind: str
    message: str


def figures(records: Sequence[StepRecord], scores: Sequence[NamedScore], ranges: Ranges) -> list[Figure]:
    """Return all charts that have data. `ranges` are the recipe's own, in place of the table's."""
    given = any("sft/loss" in record.metrics for record in records)  # the same numbers as loss/policy then
    curves = [curve for curve in CURVES if not (given and curve.title == "Policy loss")]
    found = [accuracy(records, scores), *(curve_figure(records, curve, ranges) for curve in curves), times(records)]
    return [figure for figure in found if figure.series]


def accuracy(records: Sequence[StepRecord], scores: Sequence[NamedScore]) -> Figure:
    """Draw the held-out accuracy of each mode, from the scores and, for steps without one, from the metrics."""
    modes: dict[str, dict[int, Point]] = {}
    for record in records:
        for mode, value in accuracies(record.metrics):
            low, high = (record.metrics.get(f"eval/{mode}/{end}") for end in ("low", "high"))
            modes.setdefault(mode, {})[record.step] = (finite(value), finite(low), finite(high))
    for named in scores:
        modes.setdefault(named.mode, {})[named.score.step] = (named.score.accuracy, named.score.low, named.score.high)
    series = []
    for mode, points in sorted(modes.items()):
        ends = zip(*(points[step] for step in sorted(points)), strict=True)
        series.append(Series(mode, tuple(sorted(points)), *ends))
    return Figure("Held-out accuracy", "share of items, 95 % intervals", tuple(series))


def curve_figure(records: Sequence[StepRecord], curve: Curve, ranges: Ranges) -> Figure:
    """Draw the metrics of a curve; without a finite value there is no series."""
    series = [_series(records, metric, label) for metric, label in curve.metrics]
    shown = tuple(one for one in series if any(value is not None for value in one.y))
    info = find(curve.metrics[0][0])
    rule = ranges.get(curve.metrics[0][0]) or (info.healthy if info else None)
    healthy = (None, None) if rule is None or rule.until is not None else (rule.low, rule.high)
    return Figure(curve.title, curve.unit, shown, healthy=healthy, help=help_text(curve, ranges))


def times(records: Sequence[StepRecord]) -> Figure:
    """Stack the seconds of each phase; phases that never took any are left out."""
    rows = [record for record in records if any(f"time/{phase}" in record.metrics for phase in PHASES)]
    steps = tuple(row.step for row in rows)
    series = tuple(
        Series(phase, steps, tuple(finite(row.metrics.get(f"time/{phase}", 0.0)) for row in rows))
        for phase in PHASES
        if any(row.metrics.get(f"time/{phase}", 0.0) > 0 for row in rows)
    )
    total = [record.metrics["time/step"] for record in rows if "time/step" in record.metrics]
    unit = f"seconds, mean {sum(total) / len(total):.2f} a step" if total else "seconds"
    return Figure("Time of a step by phase", unit, series, kind="stack")


def marks(records: Sequence[StepRecord], events: Iterable[Event], ranges: Ranges) -> list[Mark]:
    """Return what stands on the charts: warnings, checkpoints, resumes, evaluations, and spikes. `ranges` as in `figures`."""
    found = [
        Mark(event.step, MARKED[event.kind], event.message)
        for event in events
        if event.step is not None and event.kind in MARKED
    ]
    evaluated = [record for record in records if any(name.startswith("eval/") for name in record.metrics)]
    found += [Mark(record.step, "evaluation", "evaluated") for record in evaluated]
    names = {name for record in records for name in record.metrics}
    sudden = {
        name
        for name in names
        if (info := find(name)) and info.group != "time" and info.drift and info.drift.against == "recent"
    }
    judged = sudden | {"answer/correct"}  # which decides whether others apply
    few = [replace(one, metrics={n: value for n, value in one.metrics.items() if n in judged}) for one in records]
    found += [
        Mark(step, "spike", f"{row.name} outside its range")
        for row in find_outside(few, ranges)
        if row.name in sudden
        for step in row.steps
    ]
    return sorted(found, key=lambda mark: mark.step)


def help_text(curve: Curve, ranges: Ranges) -> str:
    """Return the meaning of a curve's metrics, each with its healthy range."""
    lines = []
    for metric, _ in curve.metrics:
        info = find(metric)
        if info is not None:
            text = healthy_text(info, ranges.get(metric))
            healthy = "" if text.startswith("–") else f" Healthy: {text}."
            lines.append(f"{metric}: {info.meaning}{healthy}")
    return "\n".join(lines)


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite: a gap in a line, and null in JSON."""
    return value if value is not None and math.isfinite(value) else None


def _series(records: Sequence[StepRecord], metric: str, label: str) -> Series:
    rows = [record for record in records if metric in record.metrics]
    return Series(label, tuple(row.step for row in rows), tuple(finite(row.metrics[metric]) for row in rows))
