"""The table of metrics, metrics.yaml: for each its unit, meaning, healthy range, advice, and the rules that watch it.

A rule of a recipe (`health.rules`) has the same form, and the name of its metric. Where a source says "proposal", the limit has
not been measured on many runs yet.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, Self, TypeAlias

import yaml
from pydantic import Field, TypeAdapter, model_validator

from lockstep.config.foreign_settings import System
from lockstep.config.section import Section

TABLE = Path(__file__).with_name("metrics.yaml")

SOLVED = 0.8
"""Share of correct replies of a step from which sameness is success."""

Tier: TypeAlias = Literal["off", "warn", "stop"]
Against: TypeAlias = Literal["fixed", "clip", "lr", "start", "recent", "numerics", "checkpoint"]


class Range(Section):
    """A healthy range that holds for any run. Example: Range(high=0.5, source="…") reads "≤ 0.5"."""

    low: float | None = None
    """Lowest healthy value."""
    high: float | None = None
    """Highest healthy value."""
    open_low: bool = False
    """The lower end itself is unhealthy: "> 0"."""
    until: int | None = None
    """Judge the value up to this step only."""
    source: str = "proposal"
    """Source of the range."""

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'>' if self.open_low else '≥'} {self.low:g}"
        high = "" if self.high is None else f"≤ {self.high:g}"
        between = low and high and not self.open_low
        text = f"{self.low:g} to {self.high:g}" if between else " and ".join(filter(None, (low, high)))
        return text if self.until is None else f"{text} at steps 1 to {self.until}"


class Drift(Section):
    """A range relative to the run itself, as factors of a baseline over `steps` steps."""

    against: Literal["start", "recent"]
    """start: the mean of the first steps; recent: the median of the last ones."""
    steps: int
    low: float | None = None
    high: float | None = None
    source: str = "proposal"

    def __str__(self) -> str:
        ends = (f"{sign} {end:g}×" for sign, end in (("≥", self.low), ("≤", self.high)) if end is not None)
        kind = "mean of the first" if self.against == "start" else "median of the last"
        return f"{' and '.join(ends)} the {kind} {self.steps} steps"


class Condition(Section):
    """Limit and patience of a rule."""

    above: float | None = Field(default=None, ge=0)
    """The rule is broken above this value; give this or `below`."""
    below: float | None = Field(default=None, ge=0)
    """The rule is broken below this value."""
    against: Against = "fixed"
    """Factor of the limit. fixed: none; clip: optimizer.max_grad_norm; lr: optimizer.lr; start: the mean of the
    run's first 5 steps; recent: the median of its last 50; numerics: 4 where rollouts compute in other numerics than updates, 10
    where activations have four bits; checkpoint: the planned size of a checkpoint in GiB."""
    tier: Tier = "warn"
    """off does not look; warn reports it once, and again after it was over; stop saves a checkpoint and ends the run."""
    steps: int = Field(default=5, ge=1)
    """Steps that must be outside, so that a single bad one never stops a run."""
    within: int | None = Field(default=None, ge=1)
    """Number of latest measured steps in which they are counted; none counts steps in a row."""
    until: int | None = Field(default=None, ge=1)
    """Last step that is judged; none judges all."""

    @model_validator(mode="after")
    def _has_one_side(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("give either above or below")
        return self


class Rule(Section):
    """One thing that may be wrong with a run."""

    when: Condition
    """When the rule is broken, and what then happens."""
    meaning: str
    """Meaning of a broken rule."""
    advice: str = ""
    """Remedy; empty: the metric's own advice."""
    source: str = "proposal"
    """Source of limit and patience."""
    shown: tuple[str, ...] = ()
    """Metrics that help to read it."""
    needs: tuple[str, ...] = ()
    """A step counts only if one of these metrics is above 0 in it."""
    not_for: tuple[str, ...] = ()
    """Kinds of algorithm.loss for which the rule does not hold."""
    metric: str = ""
    """Name of the metric that it watches."""
    name: str = ""

    @property
    def side(self) -> Literal["above", "below"]:
        """The unhealthy one."""
        return "below" if self.when.above is None else "above"

    @property
    def limit(self) -> float:
        return (self.when.below if self.when.above is None else self.when.above) or 0.0


class MetricInfo(Section):
    """One metric. In a pattern, <mode> stands for one part of the name."""

    name: str = ""
    unit: str
    meaning: str
    healthy: Range | None = None
    drift: Drift | None = None
    unsolved: bool = False
    """Judged only in steps in which less than SOLVED of the replies are correct: beyond that, nothing is left to explore."""
    advice: str = ""
    """Remedy when it is outside."""
    smoke: str = ""
    """Its label in the table of the first steps; empty: not in it."""
    rules: dict[str, Rule] = Field(default={})

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


@cache
def metrics() -> tuple[MetricInfo, ...]:
    """Return every metric of the table, in its order."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # six times as fast, where libyaml is there
    read = TypeAdapter(dict[str, MetricInfo]).validate_python(loader(TABLE.read_text("utf-8")).get_single_data())
    return tuple(info.model_copy(update={"name": name}) for name, info in read.items())


@cache
def find(name: str) -> MetricInfo | None:
    """Return the metric of that name; patterns match too: eval/<mode>/accuracy describes eval/greedy/accuracy."""
    exact = [info for info in metrics() if info.name == name]
    fitting = [info for info in metrics() if "<" in info.name and _pattern(info.name).fullmatch(name)]
    return next(iter([*exact, *fitting]), None)


def hint(name: str) -> str:
    """Return the nearest names to one that no metric has, or the groups."""
    names = [info.name for info in metrics()]
    tails = [full for full in names if full.rpartition("/")[2] == name]
    near = list(dict.fromkeys([*tails, *difflib.get_close_matches(name, names, n=3)]))
    groups = dict.fromkeys(info.group for info in metrics())
    return f"did you mean {' or '.join(near)}?" if near else f"groups are {', '.join(groups)}"


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
    )


class Elsewhere(Section):
    """A metric of another system."""

    ours: str
    means: str
    differs: str = ""


@cache
def elsewhere() -> dict[System, dict[str, Elsewhere]]:
    """Return the metrics of other systems by system and name."""
    read = yaml.safe_load(TABLE.with_name("metric_names.yaml").read_text("utf-8"))
    return TypeAdapter(dict[System, dict[str, Elsewhere]]).validate_python(read)


def named_elsewhere(name: str) -> Iterator[tuple[System, str, Elsewhere]]:
    """Yield system, full name and meaning of each metric with this name; its last part is enough: pg_loss."""
    plain = name.removeprefix("train/")
    for system, metrics_there in elsewhere().items():
        full = [known for known in metrics_there if fnmatchcase(plain, known)]
        last = [known for known in metrics_there if known.rpartition("/")[2] == plain]
        for known in [*full, *last][:1]:
            yield system, known, metrics_there[known]


@cache
def built_in_rules() -> dict[str, Rule]:
    """Return the rules of the table by name."""
    return {
        name: rule.model_copy(update={"name": name, "metric": info.name, "advice": rule.advice or info.advice})
        for info in metrics()
        for name, rule in info.rules.items()
    }
