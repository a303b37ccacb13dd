"""Curves of runs as matplotlib figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, MachineError
from lockstep.text import did_you_mean

try:
    from matplotlib.figure import Figure
except ImportError as missing:
    raise MachineError("matplotlib is not installed", fix="pip install 'lockstep-rl[notebook]'") from missing

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_METRICS = ("reward/mean", "validation/loss", "length/mean", "grad/norm")
"""Metrics that are drawn unless others are named."""
WIDTH, HEIGHT = 7.0, 2.4
"""Inches of a panel."""


class RunFigure(Figure):
    """A figure that a notebook shows without pyplot and its backends."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()


def draw(runs: Mapping[str, pd.DataFrame], names: Sequence[str], smooth: int = 1) -> RunFigure:
    """Draw metrics of one run or several, a panel per metric. Raises ConfigError for a metric that no run has."""
    if smooth < 1:
        raise ConfigError([f"smooth={smooth}: must be at least 1"])
    known = sorted({name for frame in runs.values() for name in frame.columns})
    names = names or [name for name in DEFAULT_METRICS if name in known]
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known, "see the columns of Run.metrics", most=3)
        raise ConfigError([f"there is no metric {unknown[0]} in the runs {', '.join(runs)}"], fix=hint)
    figure = RunFigure(figsize=(WIDTH, HEIGHT * max(1, len(names))), layout="constrained")
    for place, name in enumerate(names, start=1):
        axes = figure.add_subplot(len(names), 1, place)
        for run, frame in runs.items():
            if name in frame.columns:
                curve = frame[name].dropna()
                axes.plot(curve.index, curve.rolling(smooth, min_periods=1).mean(), label=run, marker=".", markersize=3)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend()
    if names:
        axes.set_xlabel("step")
    return figure
