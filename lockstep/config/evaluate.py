"""When and how a run evaluates, what stops it, and which numbers may decide."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.section import Section

Role: TypeAlias = Literal["train", "id_probe", "ood_probe", "sanity"]
"""Purpose of a set of items: trained on; like training; unlike training; too few to decide anything."""
DECIDING = ("id_probe", "ood_probe")
"""Roles that a decision may hang on: sanity sets are too small, and training questions are not held out."""
NONDET = "nondet_proxy"
"""Several greedy replies an item, which differ only by what the hardware does: a diagnosis, not a score of the model."""
GREEDY = "greedy_pass@1"
PRESET_TEMPERATURE = 0.6
"""Temperature of the modes avg@k, pass@k and maj@k without settings of their own."""
_ESTIMATE = re.compile(r"(avg|pass|maj)@([1-9]\d*)")


class EvalMode(Section):
    """One way to decode in an evaluation; its name is part of the score."""

    name: str = Field(default="greedy", pattern=r"^[a-z0-9_.@-]+$")
    """Label of the scores. Example: greedy, sampled. Names that promise something are held to it: greedy_pass@1, avg@8, pass@8,
    maj@8, nondet_proxy."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    samples: int = Field(default=1, ge=1)
    """Replies per item. At temperature 0 more than one only in the mode nondet_proxy, which shows how far replies differ by what
    the hardware does."""
    estimates: list[str] = Field(default_factory=list)
    """Numbers made of an item's replies: avg@n (their mean), pass@k (any of k right, unbiased), maj@n (the majority's answer is
    right). The first is the mode's accuracy. Empty takes the one that the name says, or avg@n, and then the others."""

    @classmethod
    def named(cls, name: str) -> dict[str, object] | None:
        """The settings that a name alone stands for, as in `eval.modes: greedy,avg@8`; None if it stands for none."""
        if name in ("greedy", "sampled"):
            return {"name": name, "temperature": 0.0 if name == "greedy" else 1.0}
        try:
            mode = preset_mode(name)
        except ValueError:  # avg@1
            return None
        return None if mode is None else mode.model_dump(mode="json", exclude_defaults=True) | {"name": name}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The estimates in force, headline first. Example: ("avg@8", "pass@8", "maj@8")"""
        if self.estimates:  # of one reply the mean, the majority and any of them are one number, with one name
            return tuple(dict.fromkeys(re.sub(r"^(avg|maj)@1$", "pass@1", number) for number in self.estimates))
        if self.samples == 1:
            return ("pass@1",)
        own = [self.name] if _ESTIMATE.fullmatch(self.name) else []
        return tuple(dict.fromkeys([*own, *(f"{kind}@{self.samples}" for kind in ("avg", "pass", "maj"))]))

    @model_validator(mode="after")
    def _greedy_is_one(self) -> Self:
        nondet = self.name.startswith(NONDET)
        if nondet and (self.temperature > 0 or self.samples < 2):
            raise ValueError(f"{self.name} is several replies at temperature 0; set temperature: 0 and samples: 8")
        if self.temperature == 0 and self.samples > 1 and not nondet:
            raise ValueError(
                "temperature 0 gives the same reply every time; set samples: 1 or a temperature above 0, or name the mode "
                f"{NONDET} to see how far replies differ by what the hardware does"
            )
        return self

    @model_validator(mode="after")
    def _keeps_what_its_name_says(self) -> Self:
        if self.name == GREEDY and (self.temperature, self.samples) != (0, 1):
            raise ValueError(f"{GREEDY} is one reply at temperature 0")
        for number in self.numbers:
            match = _ESTIMATE.fullmatch(number)
            if match is None:
                raise ValueError(f"{number} is no estimate; there are avg@n, pass@k and maj@n")
            kind, k = match[1], int(match[2])
            if k > self.samples or (kind != "pass" and k != self.samples):
                raise ValueError(f"{number} needs {k} samples of an item, this mode draws {self.samples}")
        if _ESTIMATE.fullmatch(self.name) and self.numbers[0] != self.name:
            raise ValueError(f"a mode named {self.name} whose first estimate is {self.numbers[0]}; rename one of them")
        return self


def preset_mode(name: str) -> EvalMode | None:
    """The mode that a name alone stands for: greedy_pass@1, avg@8, pass@8, maj@8, nondet_proxy@8; None for any other."""
    if name == GREEDY:
        return EvalMode(name=name)
    if match := re.fullmatch(rf"{NONDET}(?:@(\d+))?", name):
        return EvalMode(name=name, samples=int(match[1] or 8))
    if match := _ESTIMATE.fullmatch(name):
        return EvalMode(name=name, temperature=PRESET_TEMPERATURE, samples=int(match[2]))
    return None


class EvalSet(Section):
    """One more set of items that a run evaluates on, in all modes; its scores are named <role>.<mode>."""

    role: Role
    """Purpose: id_probe (held out, like training), ood_probe (held out, unlike training), sanity (too few items to decide
    anything), or train."""
    items: int = Field(default=200, ge=1)
    """Problems."""


class NoStop(Section):
    """Train to the last step."""

    kind: Literal["none"] = "none"


class Drops(Section):
    """Stop when a metric falls so many evaluations in a row."""

    kind: Literal["drops"] = "drops"
    metric: str = "eval/ood_probe.greedy/accuracy"
    """Of which evaluation. Example: eval/greedy/accuracy"""
    in_a_row: int = Field(default=2, ge=1)
    """Drops, one after the other."""
    min_delta: float = Field(default=0.0, ge=0)
    """A fall by no more than this is none. Example: 0.01 is one point."""


class Plateau(Section):
    """Stop when the smoothed metric has not risen for some evaluations."""

    kind: Literal["plateau"] = "plateau"
    metric: str = "eval/ood_probe.greedy/accuracy"
    """Of which evaluation. Example: eval/greedy/accuracy"""
    smooth: int = Field(default=3, ge=1)
    """Mean of so many evaluations."""
    patience: int = Field(default=5, ge=1)
    """Evaluations without a new best mean."""
    min_delta: float = Field(default=0.01, ge=0)
    """A new best is more than this above the last. Example: 0.01 is one point."""


Stop: TypeAlias = Annotated[NoStop | Drops | Plateau, Field(discriminator="kind")]


class Eval(Section):
    """When and how to evaluate. The last step is always evaluated."""

    enabled: bool = True
    """Off skips every evaluation, and the log says so."""
    every: int = Field(default=20, ge=1)
    """Steps between evaluations."""
    at_start: bool = True
    """Evaluate the base model before the first step."""
    items: int = Field(default=200, ge=1)
    """Held-out problems."""
    role: Role = "id_probe"
    """Which set: id_probe (like training), ood_probe (unlike training), sanity (nothing may be decided by it), or train."""
    also: list[EvalSet] = Field(default_factory=list)
    """More sets, evaluated at the same steps. Example: [{role: ood_probe, items: 202}]"""
    modes: list[EvalMode] = Field(
        default_factory=lambda: [EvalMode(), EvalMode(name="sampled", temperature=1.0)], min_length=1
    )
    """Decoding modes, each a score of its own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest reply; none takes rollout.max_tokens."""
    stop: Stop = NoStop()

    @property
    def sets(self) -> tuple[EvalSet, ...]:
        """All sets, the main one first."""
        return (EvalSet(role=self.role, items=self.items), *self.also)

    def score_name(self, role: str, mode: str) -> str:
        """Name of a set's scores of a mode in metrics and files. Examples: "greedy", "ood_probe.greedy"."""
        return mode if role == self.role else f"{role}.{mode}"

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [mode.name for mode in self.modes]
        if len(set(names)) < len(names):
            raise ValueError(f"mode names must differ, got {', '.join(names)}")
        roles = [one.role for one in self.sets]
        if len(set(roles)) < len(roles):
            raise ValueError(f"each role is evaluated once, got {', '.join(roles)}")
        return self

    @model_validator(mode="after")
    def _stops_by_what_it_measures(self) -> Self:
        match self.stop:
            case Drops(metric=metric) | Plateau(metric=metric):
                if mistake := decision_mistake(self, metric):
                    raise ValueError(f"stop.metric = {metric}: {mistake}")
                if not metric.startswith("eval/"):
                    raise ValueError(
                        f"stop.metric = {metric}: a rule looks at evaluations, whose metrics begin with eval/"
                    )
            case NoStop():
                pass
        return self


def decision_mistake(settings: Eval, metric: str) -> str:
    """Why nothing may hang on a metric of evaluations; "" if it may, or if it is no metric of an evaluation."""
    if not metric.startswith("eval/"):
        return ""
    if not settings.enabled:
        return "eval.enabled is false, so it is never measured"
    name, _, number = metric.removeprefix("eval/").rpartition("/")
    known = {settings.score_name(one.role, mode.name): (one, mode) for one in settings.sets for mode in settings.modes}
    if name not in known:
        return f"no evaluation has this name; there are {', '.join(f'eval/{each}/accuracy' for each in known)}"
    one, mode = known[name]
    if one.role not in DECIDING:
        why = (
            f"{one.items} items, 1 item = {100 / one.items:.2g} points"
            if one.role == "sanity"
            else "it is not held out"
        )
        return f"no decision can hang on a {one.role} set ({why}); take one of {', '.join(DECIDING)}"
    if mode.name.startswith(NONDET):
        return f"{mode.name} is a diagnosis of the hardware; no decision can hang on it"
    if number not in ("accuracy", "low", *mode.numbers):
        return f"{number} says nothing about quality; there are {', '.join(('accuracy', *mode.numbers))}"
    return ""
