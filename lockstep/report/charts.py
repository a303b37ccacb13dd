"""Which curves the page shows, and from which metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.report.elements import text
from lockstep.report.gather import NamedScore, RunFacts
from lockstep.report.svg import Point, Series, legend, line_chart, short, stacked_chart
from lockstep.track.catalogue import find
from lockstep.track.writer import StepRecord


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


def charts(facts: RunFacts) -> str:
    """All curves that have data, as a grid of figures."""
    given = any("sft/loss" in record.metrics for record in facts.records)  # the same numbers as loss/policy then
    curves = [curve for curve in CURVES if not (given and curve.title == "Policy loss")]
    parts = [accuracy_chart(facts), *(_curve(facts.records, curve) for curve in curves), time_chart(facts.records)]
    body = "".join(parts)
    return f'<div class="charts">{body}</div>' if body else ""


def accuracy_chart(facts: RunFacts) -> str:
    """Held-out accuracy of each mode with its interval, from the scores and, for steps without one, from the metrics."""
    points = {**_from_metrics(facts.records), **_from_scores(facts.scores)}
    modes = sorted({mode for mode, _ in points})
    series = [Series(one, tuple(point for (mode, _), point in sorted(points.items()) if mode == one)) for one in modes]
    return _figure(
        "Held-out accuracy", "share of items, 95 % intervals", series, line_chart("Held-out accuracy", series)
    )


def time_chart(records: Sequence[StepRecord]) -> str:
    """Seconds of each phase, stacked; phases that never took any are left out."""
    rows = [record for record in records if any(f"time/{phase}" in record.metrics for phase in PHASES)]
    series = [
        Series(phase, tuple(Point(r.step, r.metrics.get(f"time/{phase}", 0.0)) for r in rows))
        for phase in PHASES
        if any(r.metrics.get(f"time/{phase}", 0.0) > 0 for r in rows)
    ]
    total = [record.metrics["time/step"] for record in rows if "time/step" in record.metrics]
    mean = f"seconds, mean {sum(total) / len(total):.2f} a step" if total else "seconds"
    return _figure(
        "Time of a step by phase", mean, series, stacked_chart("Time of a step by phase", series), last=False
    )


def _curve(records: Sequence[StepRecord], curve: Curve) -> str:
    series = [
        Series(label, points)
        for metric, label in curve.metrics
        if (points := _points(records, metric)) and _any_finite(points)
    ]
    limits = _limits(curve.metrics[0][0])
    return _figure(curve.title, curve.unit, series, line_chart(curve.title, series, limits=limits))


def _figure(title: str, unit: str, series: Sequence[Series], svg: str, *, last: bool = True) -> str:
    if not svg:
        return ""
    now = next((p.y for p in reversed(series[0].points) if math.isfinite(p.y)), None)
    value = f"last {short(now)}" if last and now is not None and len(series) == 1 else ""
    aside = ", ".join(part for part in (unit, value) if part)
    keys = f'<div class="keys">{legend([one.label for one in series])}</div>' if len(series) > 1 else ""
    caption = f'<figcaption>{text(title)}<span class="soft">{text(aside)}</span></figcaption>'
    return f"<figure>{caption}{keys}{svg}</figure>"


def _points(records: Sequence[StepRecord], metric: str) -> tuple[Point, ...]:
    return tuple(Point(record.step, record.metrics[metric]) for record in records if metric in record.metrics)


def _any_finite(points: Sequence[Point]) -> bool:
    return any(math.isfinite(point.y) for point in points)


def _limits(metric: str) -> list[float]:
    info = find(metric)
    if info is None or info.healthy is None or info.healthy.until_step is not None:
        return []
    return [end for end in (info.healthy.low, info.healthy.high) if end]  # 0 is the axis


def _from_metrics(records: Sequence[StepRecord]) -> dict[tuple[str, int], Point]:
    points: dict[tuple[str, int], Point] = {}
    for record in records:
        for name, value in record.metrics.items():
            parts = name.split("/")
            if len(parts) == 3 and parts[0] == "eval" and parts[2] == "accuracy":
                low, high = (record.metrics.get(f"eval/{parts[1]}/{end}") for end in ("low", "high"))
                points[parts[1], record.step] = Point(record.step, value, low, high)
    return points


def _from_scores(scores: Sequence[NamedScore]) -> dict[tuple[str, int], Point]:
    rows = [(named.mode, named.score) for named in scores]
    return {(mode, s.step): Point(s.step, s.accuracy, s.low, s.high) for mode, s in rows}
