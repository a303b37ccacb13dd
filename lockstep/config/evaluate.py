"""Settings of evaluation: its steps, items and modes, rules that stop a run early, and pass criteria declared before training."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.section import PathText, Section

Role: TypeAlias = Literal["train", "id_probe", "ood_probe", "sanity"]
"""Purpose of a set of items: trained on; like training; unlike training; too few to decide anything."""
DECIDING = ("id_probe", "ood_probe")
"""Roles that may decide something: sanity sets are too small, and training questions are not held out."""
NONDET = "nondet_proxy"
"""Several greedy replies to an item, which differ only by the hardware's rounding: a diagnosis, not a score of the model."""
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
    samples: int = Field(default=1, ge=1, le=100_000)
    """Replies per item. At temperature 0 more than one only in the mode nondet_proxy, which shows differences by the hardware's
    rounding."""
    estimates: list[str] = Field(default_factory=list)
    """Estimates of an item's replies: avg@n (their mean), pass@k (any of k right, unbiased), maj@n (the majority's answer
    is right). The first is the mode's accuracy. Empty takes the one that the name says, or avg@n, and then the others."""

    @classmethod
    def named(cls, name: str) -> dict[str, object] | None:
        """Return the settings that a name alone stands for, as in `eval.modes: greedy,avg@8`; None if it stands for none."""
        if name in ("greedy", "sampled"):
            return {"name": name, "temperature": 0.0 if name == "greedy" else 1.0}
        try:
            mode = preset_mode(name)
        except ValueError:  # avg@1
            return None
        return None if mode is None else mode.model_dump(mode="json", exclude_defaults=True) | {"name": name}

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        return (cls.named(value) or value) if isinstance(value, str) else value

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
    def _keeps_what_its_name_says(self) -> Self:
        nondet = self.name.startswith(NONDET)
        if nondet and (self.temperature > 0 or self.samples < 2):
            raise ValueError(f"{self.name} is several replies at temperature 0; set temperature: 0 and samples: 8")
        if self.temperature == 0 and self.samples > 1 and not nondet:
            raise ValueError(
                "temperature 0 gives the same reply every time; set samples: 1 or a temperature above 0, or name the mode "
                f"{NONDET} to see how far replies differ by the hardware's rounding"
            )
        if self.name == GREEDY and (self.temperature, self.samples) != (0, 1):
            raise ValueError(f"{GREEDY} is one reply at temperature 0")
        for number in self.numbers:
            match = _ESTIMATE.fullmatch(number)
            if match is None:
                raise ValueError(f"{number} is not an estimate; there are avg@n, pass@k and maj@n. Example: pass@8")
            kind, k = match[1], int(match[2])
            if k > self.samples or (kind != "pass" and k != self.samples):
                raise ValueError(
                    f"{number} needs {k} samples per item, and this mode draws {self.samples}: set its samples"
                )
        if _ESTIMATE.fullmatch(self.name) and self.numbers[0] != self.name:
            raise ValueError(f"a mode named {self.name} whose first estimate is {self.numbers[0]}; rename one of them")
        return self


def preset_mode(name: str) -> EvalMode | None:
    """Return the mode that a name alone stands for: greedy_pass@1, avg@8, pass@8, maj@8, nondet_proxy@8; None for any other."""
    if name == GREEDY:
        return EvalMode(name=name)
    if match := re.fullmatch(rf"{NONDET}(?:@(\d+))?", name):
        return EvalMode(name=name, samples=int(match[1] or 8))
    if match := _ESTIMATE.fullmatch(name):
        return EvalMode(name=name, temperature=PRESET_TEMPERATURE, samples=int(match[2]))
    return None


class EvalSet(Section):
    """One more set of items that a run evaluates on; its scores are named <role>.<mode>."""

    role: Role
    """Purpose: id_probe (held out, like training), ood_probe (held out, unlike training), sanity (too few items to decide
    anything), or train."""
    items: int = Field(default=200, ge=1)
    """Problems."""
    every: int | None = Field(default=None, ge=1)
    """Steps between its evaluations; none is eval.every. Base and last step are always evaluated."""
    modes: list[EvalMode] = Field(default_factory=list)
    """Its decoding modes; empty takes eval.modes. Example: avg@8 is eight replies at temperature 0.6"""


class Gate(Section):
    """One thing that must hold at the steps at which a run is judged."""

    score: str
    """Name of a score. Example: greedy, ood_probe.greedy, sanity.avg@8"""
    rule: Literal["improves", "holds", "reaches"] = "improves"
    """improves: above the base by the paired test, at 0.05 divided by the number of judged steps; holds: not below the base by
    that test; reaches: accuracy of at least `limit`."""
    limit: float = Field(default=0.0, ge=0, le=1)
    """Accuracy to reach, for reaches; smallest rise that counts, for improves."""


class Judged(Section):
    """Steps at which a run will be judged and what counts as success, said before it starts. They cannot change afterwards."""

    steps: list[int] = Field(default_factory=list)
    """Trained steps. Each is evaluated on all sets. Example: [100, 200, 300]"""
    gates: list[Gate] = Field(default_factory=list)
    """Conditions of success. All must hold at one of the steps."""
    preset: Literal["none", "gain", "gain_and_hold"] = "none"
    """gain: the first score that may decide improves. gain_and_hold: in addition no other such score falls."""


class LmEvalSet(Section):
    """A task of lm-eval, measured at the same steps with this run's weights, conditions and intervals (`pip install
    'lockstep-rl[lm-eval]'`); its scores are named lm_eval.<name>."""

    name: str = Field(pattern=r"^[a-z0-9_-]+$")
    """Short name. Example: arc"""
    path: PathText
    """The task's YAML file, as lm-eval reads it. It may name functions of a Python file beside it, which then run."""
    metric: str = ""
    """The task's metric that counts, 0 or 1 for each item; empty takes its first. Example: acc_norm"""
    filter: str = ""
    """The task's filter that counts; empty takes its first."""
    items: int | None = Field(default=None, ge=1)
    """First items only; none takes all."""
    fewshot: int | None = Field(default=None, ge=0)
    """Examples before a question; none takes the task's own."""
    chat: bool = False
    """Put prompts into the model's chat template. lm-eval's own default is off."""


class NoStop(Section):
    """Train to the last step."""

    kind: Literal["none"] = "none"


class Drops(Section):
    """Stop when a metric falls several evaluations in a row."""

    kind: Literal["drops"] = "drops"
    metric: str = "eval/ood_probe.greedy/accuracy"
    """Metric to watch. Example: eval/greedy/accuracy"""
    in_a_row: int = Field(default=2, ge=1)
    """Number of consecutive drops."""
    min_delta: float = Field(default=0.0, ge=0)
    """Falls up to this size do not count. Example: 0.01 is one point."""


class Plateau(Section):
    """Stop when the smoothed metric has not risen for some evaluations."""

    kind: Literal["plateau"] = "plateau"
    metric: str = "eval/ood_probe.greedy/accuracy"
    """Metric to watch. Example: eval/greedy/accuracy"""
    smooth: int = Field(default=3, ge=1)
    """Number of evaluations to average."""
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
    """Purpose of the set: id_probe (like training), ood_probe (unlike training), sanity (too few items), or train."""
    also: list[EvalSet] = Field(default_factory=list)
    """More sets. Example: [{role: ood_probe, items: 202, every: 5, modes: [greedy]}, {role: sanity, modes: [avg@8]}]"""
    lm_eval: list[LmEvalSet] = Field(default_factory=list)
    """Tasks of lm-eval. Example: [{name: arc, path: tasks/arc.yaml, metric: acc_norm}]"""
    modes: list[EvalMode] = Field(
        default_factory=lambda: [EvalMode(), EvalMode(name="sampled", temperature=1.0)], min_length=1
    )
    """Decoding modes, each a score of its own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest reply; none takes rollout.max_tokens."""
    stop: Stop = NoStop()
    judged: Judged = Judged()

    @property
    def sets(self) -> tuple[EvalSet, ...]:
        """All sets with their own cadence and modes, the main one first."""
        sets = (EvalSet(role=self.role, items=self.items), *self.also)
        own = ({"every": one.every or self.every, "modes": one.modes or self.modes} for one in sets)
        return tuple(one.model_copy(update=update) for one, update in zip(sets, own, strict=True))

    @property
    def pairs(self) -> list[tuple[EvalSet, EvalMode]]:
        """Every set with each of its modes."""
        return [(one, mode) for one in self.sets for mode in one.modes]

    @property
    def scores(self) -> dict[str, tuple[EvalSet, EvalMode]]:
        """The same by the names of the scores."""
        return {self.score_name(one.role, mode.name): (one, mode) for one, mode in self.pairs}

    @property
    def deciding(self) -> list[str]:
        """Names of the scores that may decide something."""
        found = self.scores.items()
        return [name for name, (one, mode) in found if one.role in DECIDING and not mode.name.startswith(NONDET)]

    @property
    def gates(self) -> list[Gate]:
        """Return what must hold at the steps judged, the gates of the preset included."""
        preset = [Gate(score=name, rule="holds" if index else "improves") for index, name in enumerate(self.deciding)]
        kept = {"none": 0, "gain": 1, "gain_and_hold": len(preset)}[self.judged.preset]
        return [*preset[:kept], *self.judged.gates]

    def score_name(self, role: str, mode: str) -> str:
        """Return the name of a set's scores of a mode in metrics and files. Examples: "greedy", "ood_probe.greedy"."""
        return mode if role == self.role else f"{role}.{mode}"

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for names in ([mode.name for mode in one.modes] for one in self.sets):
            if len(set(names)) < len(names):
                raise ValueError(f"mode names must differ, got {', '.join(names)}")
        roles = [one.role for one in self.sets]
        if len(set(roles)) < len(roles):
            raise ValueError(f"each role may be evaluated only once, got {', '.join(roles)}")
        tasks = [one.name for one in self.lm_eval]
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"names of lm_eval must differ, got {', '.join(tasks)}")
        return self

    @model_validator(mode="after")
    def _judges_what_it_measures(self) -> Self:
        if bool(self.judged.steps) != bool(self.gates):
            raise ValueError("judged needs both: steps, and gates or a preset (a preset takes scores that may decide)")
        for gate in self.judged.gates:
            if gate.score not in self.scores:
                raise ValueError(f"judged.gates: there is no score {gate.score}; there are {', '.join(self.scores)}")
            if mistake := decision_mistake(self, f"eval/{gate.score}/accuracy"):
                raise ValueError(f"judged.gates: {gate.score}: {mistake}")
        if self.judged.steps and not self.at_start and any(gate.rule != "reaches" for gate in self.gates):
            raise ValueError("judged compares with the base, and eval.at_start is false")
        return self

    @model_validator(mode="after")
    def _stops_by_what_it_measures(self) -> Self:
        match self.stop:
            case Drops(metric=metric) | Plateau(metric=metric):
                if mistake := decision_mistake(self, metric):
                    raise ValueError(f"stop.metric={metric}: {mistake}")
                if not metric.startswith("eval/"):
                    raise ValueError(
                        f"stop.metric={metric}: a stopping rule needs a metric of an evaluation, whose name begins with eval/"
                    )
            case NoStop():
                pass
        return self


def decision_mistake(settings: Eval, metric: str) -> str:
    """Return why a metric must not decide anything; "" if it may, or if it is not a metric of an evaluation."""
    if not metric.startswith("eval/"):
        return ""
    if not settings.enabled:
        return "eval.enabled is false, so it is never measured"
    name, _, number = metric.removeprefix("eval/").rpartition("/")
    known = settings.scores
    if name not in known:
        return f"no evaluation has this name; there are {', '.join(f'eval/{each}/accuracy' for each in known)}"
    one, mode = known[name]
    if one.role not in DECIDING:
        why = (
            f"{one.items} items, 1 item = {100 / one.items:.3g} points"
            if one.role == "sanity"
            else "it is not held out"
        )
        return f"a {one.role} set must not decide anything ({why}); take one of {', '.join(DECIDING)}"
    if mode.name.startswith(NONDET):
        return f"{mode.name} is a diagnosis of the hardware; it must not decide anything"
    if number not in ("accuracy", "low", *mode.numbers):
        return f"{number} says nothing about quality; there are {', '.join(('accuracy', *mode.numbers))}"
    return ""
