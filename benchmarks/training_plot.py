"""Curves of several training runs in one picture; shared by the benchmarks beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from training_runs import Outcome

from lockstep.report.svg import Point, Series, line_chart

CURVE = "reward/mean"
STYLE = """
svg { background: #ffffff; } text { font: 10.5px system-ui, sans-serif; fill: #55554f; }
.grid { stroke: #e4e4de; } .line { fill: none; stroke: currentColor; stroke-width: 1.7; stroke-linejoin: round; }
.bar { stroke: currentColor; stroke-width: 1.2; opacity: .45; } .mark { fill: currentColor; }
.c0 { color: #b3261e; } .c1 { color: #1f6feb; } .c2 { color: #1a7f37; } .c3 { color: #8250df; } .c4 { color: #9a6700; }
"""


def plot(outcomes: Sequence[Outcome], meaning: Mapping[str, str]) -> str:
    """A picture that stands on its own: the chart of a report with its colours and a legend in it."""
    labels = list(dict.fromkeys(outcome.job.label for outcome in outcomes))
    series = [Series(label, curve([o for o in outcomes if o.job.label == label])) for label in labels]
    chart = line_chart("Mean training reward by step", series)
    height = 190 + 16 * len(labels)
    keys = "".join(
        f'<g class="c{index % 6}"><rect x="52" y="{196 + 16 * index}" width="10" height="10" fill="currentColor"/>'
        f'<text x="68" y="{205 + 16 * index}">{escape(label)}: {escape(meaning[label])}</text></g>'
        for index, label in enumerate(labels)
    )
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 380 {height}" width="760" role="img"'
    chart = chart.replace('<svg viewBox="0 0 380 190" role="img"', opened, 1)
    head, _, body = chart.partition(">")
    page = f'<rect width="380" height="{height}" fill="#ffffff"/>'
    return f"{head}><style>{STYLE}</style>{page}{body.removesuffix('</svg>')}{keys}</svg>"


def curve(outcomes: Sequence[Outcome]) -> tuple[Point, ...]:
    """Mean, lowest and highest of the seeds at each step that all of them have."""
    by_step: dict[int, list[float]] = {}
    for outcome in outcomes:
        for record in outcome.records:
            if CURVE in record.metrics:
                by_step.setdefault(record.step, []).append(record.metrics[CURVE])
    full = {step: values for step, values in sorted(by_step.items()) if len(values) == len(outcomes)}
    return tuple(
        Point(step, fmean(values), min(values), max(values))
        if all(map(math.isfinite, values))
        else Point(step, math.nan)
        for step, values in full.items()
    )
