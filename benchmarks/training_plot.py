"""Curves of several training runs in one picture; shared by the benchmarks beside it. Needs matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure
from training_runs import Outcome

CURVE = "reward/mean"


def plot(
    outcomes: Sequence[Outcome],
    meaning: Mapping[str, str],
    metric: str = CURVE,
    title: str = "Mean training reward by step",
    *,
    logarithmic: bool = False,
) -> str:
    """Draw the mean of each label's seeds, with lowest and highest as bars, as SVG. On a logarithmic axis 0 is drawn at 1e-6."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    for label in dict.fromkeys(outcome.job.label for outcome in outcomes):
        points = curve([outcome for outcome in outcomes if outcome.job.label == label], metric)
        if logarithmic:
            points = [(step, *(max(value, 1e-6) for value in values)) for step, *values in points]  # type: ignore[misc]
        spread = [[y - low for _, y, low, _ in points], [high - y for _, y, _, high in points]]
        steps, means = [step for step, *_ in points], [y for _, y, *_ in points]
        axes.errorbar(steps, means, yerr=spread, elinewidth=0.6, label=f"{label}: {meaning[label]}")
    axes.set(title=title, xlabel="step", yscale="log" if logarithmic else "linear")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def curve(outcomes: Sequence[Outcome], metric: str = CURVE) -> list[tuple[int, float, float, float]]:
    """Return step, mean, lowest and highest of the seeds at each step that all of them have."""
    by_step: dict[int, list[float]] = {}
    for outcome in outcomes:
        for record in outcome.records:
            if metric in record.metrics:
                by_step.setdefault(record.step, []).append(record.metrics[metric])
    full = {step: values for step, values in sorted(by_step.items()) if len(values) == len(outcomes)}
    return [
        (step, fmean(values), min(values), max(values))
        for step, values in full.items()
        if all(map(math.isfinite, values))
    ]
