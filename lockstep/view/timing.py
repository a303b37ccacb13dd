"""Times of the phases of a step for each rank, beside their lower bounds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lockstep.report.figures import PHASES
from lockstep.track.writer import StepRecord


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: means over the steps of a range."""

    name: str
    seconds: float
    floor: float | None
    """Least seconds; None if it is not known."""
    ranks: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Mean seconds of a step."""

    steps: int
    step: float
    phases: tuple[Phase, ...]


def phase_times(records: Sequence[StepRecord], first: int, last: int) -> PhaseTimes:
    """Average the times of the steps from `first` to `last`."""
    rows = [one.metrics for one in records if first <= one.step <= last and "time/step" in one.metrics]

    def mean(name: str) -> float | None:
        values = [row.get(name, 0.0) for row in rows]
        return fmean(values) if any(values) else None

    names = {name for row in rows for name in row}
    phases = []
    for phase in PHASES:
        if (seconds := mean(f"time/{phase}")) is None:
            continue
        numbers = sorted(int(found[1]) for name in names if (found := re.fullmatch(rf"time/rank(\d+)_{phase}", name)))
        ranks = tuple((f"rank {number}", mean(f"time/rank{number}_{phase}") or 0.0) for number in numbers)
        phases.append(Phase(phase, seconds, mean(f"time/floor_{phase}"), ranks))
    return PhaseTimes(len(rows), mean("time/step") or 0.0, tuple(phases))
