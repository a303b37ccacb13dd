"""How a metric is described: its unit, its meaning, and what is healthy.

Where a range's source says "proposal", nobody has measured it on many runs yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NOTES = "notes of earlier GRPO runs"
"""A source of healthy ranges."""


@dataclass(frozen=True, slots=True)
class Healthy:
    """A range that holds for any run. Example: Healthy(high=0.5, source="…") reads "≤ 0.5"."""

    low: float | None = None
    high: float | None = None
    source: str = "proposal"
    open_low: bool = False
    """The lower end itself is unhealthy: "> 0"."""
    until_step: int | None = None
    """Judged up to this step only."""

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'>' if self.open_low else '≥'} {self.low:g}"
        high = "" if self.high is None else f"≤ {self.high:g}"
        text = (
            f"{self.low:g} to {self.high:g}"
            if low and high and not self.open_low
            else " and ".join(filter(None, (low, high)))
        )
        return text if self.until_step is None else f"{text} at steps 1 to {self.until_step}"


@dataclass(frozen=True, slots=True)
class Drift:
    """A range relative to the run itself, as factors of a baseline over `steps` steps."""

    against: Literal["start", "recent"]
    """start: the mean of the first steps; recent: the median of the last ones."""
    steps: int
    low: float | None = None
    high: float | None = None
    source: str = "proposal"

    def __str__(self) -> str:
        ends = [
            f"≥ {self.low:g}×" if self.low is not None else "",
            f"≤ {self.high:g}×" if self.high is not None else "",
        ]
        what = (
            f"mean of the first {self.steps} steps"
            if self.against == "start"
            else f"median of the last {self.steps} steps"
        )
        return f"{' and '.join(filter(None, ends))} the {what}"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric. In a pattern, <mode> stands for one part of the name."""

    name: str
    unit: str
    meaning: str
    healthy: Healthy | None = None
    drift: Drift | None = None
    advice: str = ""
    """What to do when it is outside."""

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]
