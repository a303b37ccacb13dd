"""Applies the health rules (config/metrics.yaml) to a run's metrics, step by step, and returns the alarms.

Alarms depend only on the recipe and the metrics, so a resumed run that first reads the recorded steps raises the same alarms as
an uninterrupted run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from lockstep.config.health import HealthRule
from lockstep.config.metric import Rule, built_in_rules
from lockstep.config.schema import Recipe
from lockstep.health.rules import DRIFTS, MAGNIFIED, QUANTISED, SPARE_GIB
from lockstep.health.trends import Trends
from lockstep.track.catalogue import applies, baseline, find, window

SHOWN = 10
"""Values of the last steps that an alarm names."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The end of a rule's range in a step. Example: Limit(100.0, "100 (100 times optimizer.max_grad_norm = 1)")"""

    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A measured step of a rule."""

    step: int
    value: float
    outside: bool


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that is broken."""

    rule: Rule
    setting: HealthRule
    limit: Limit
    seen: tuple[Seen, ...]
    """The rule's window, oldest first."""
    context: Mapping[str, float]
    """Other metrics of the last step, by name."""

    @property
    def place(self) -> str:
        """Name of the rule's settings. Example: "health.clipping"; "health.rules.cites" for a rule of the recipe."""
        return f"health.{'' if self.rule.name in built_in_rules() else 'rules.'}{self.rule.name}"

    @property
    def off(self) -> str:
        """Setting that switches the rule off."""
        return f"{self.place}=off" if self.rule.name in built_in_rules() else f"{self.place}.when.tier=off"

    @property
    def advice(self) -> str:
        """Remedy: the rule's, else its metric's; "" if there is none."""
        info = find(self.rule.metric)
        return (self.rule.advice or (info.advice if info else "")).rstrip(".")

    @property
    def to_do(self) -> str:
        """The remedy as a line of its own; "" if there is none."""
        return f"\n  to do: {self.advice}" if self.advice else ""

    @property
    def what(self) -> str:
        """The rule, the numbers of the last steps, and what they mean."""
        outside, last = sum(one.outside for one in self.seen), self.seen[-SHOWN:]
        values = ", ".join(f"{one.value:.4g}" for one in last)
        beside = ", ".join(f"{name} {value:.4g}" for name, value in self.context.items())
        return (
            f"{self.rule.name}: {self.rule.metric} was {self.rule.side} {self.limit.text} in {outside} of the last "
            f"{len(self.seen)} measured steps ({values} at steps {last[0].step} to {last[-1].step}"
            f"{'; ' + beside if beside else ''}): {self.rule.meaning}"
        )


@dataclass(slots=True)
class _History:
    seen: deque[Seen]
    earlier: list[float] = field(default_factory=list)
    """Values for the run's own baseline."""
    broken: bool = False


class HealthJudge:
    """Judges a run's steps in order. `checkpoint_gib`: planned size of a checkpoint, 0 if it is not known."""

    def __init__(self, recipe: Recipe, checkpoint_gib: float = 0.0) -> None:
        self._recipe, self._checkpoint_gib = recipe, checkpoint_gib
        loss = recipe.algorithm.loss.kind
        self._rules = [
            (rule, _as_allowed(rule, setting, recipe))
            for rule, setting in recipe.health.in_force()
            if setting.tier != "off" and loss not in rule.not_for
        ]
        self._trends = Trends(recipe)
        self._past = {rule.name: _History(deque(maxlen=setting.window)) for rule, setting in self._rules}

    def step(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms of the rules that this step breaks.

        A rule that stops the run gives one in every such step; a rule that warns, only when it becomes broken.
        A rule whose metric is absent neither counts the step nor forgets those before it.
        """
        metrics = {**metrics, **self._trends.step(step, metrics)}
        return [
            alarm for rule, setting in self._rules if (alarm := self._apply(rule, setting, step, metrics)) is not None
        ]

    def _apply(self, rule: Rule, setting: HealthRule, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        if rule.metric not in metrics or (setting.until is not None and step > setting.until):
            return None
        if not applies(rule.metric, metrics):
            return None
        if rule.needs and not any(metrics.get(name, 0.0) > 0 for name in rule.needs):
            return None
        past, value = self._past[rule.name], metrics[rule.metric]
        limit = self._limit(rule, setting.limit, past.earlier)
        if (drift := DRIFTS.get(rule.when.against)) is not None and math.isfinite(value):
            past.earlier = window(drift, [*past.earlier, value])
        if limit is None:
            return None
        past.seen.append(Seen(step, value, outside(rule, value, limit.value)))
        before, past.broken = past.broken, sum(one.outside for one in past.seen) >= setting.steps
        if not past.broken or not past.seen[-1].outside or (before and setting.tier == "warn"):
            return None
        context = {name: metrics[name] for name in rule.shown if name in metrics}
        return Alarm(rule, setting, limit, tuple(past.seen), context)

    def _limit(self, rule: Rule, factor: float, earlier: list[float]) -> Limit | None:
        """Return the end of the range; None while the run has too short a past, or one that was mostly 0."""
        recipe = self._recipe
        match rule.when.against:
            case "fixed":
                return Limit(factor, f"{factor:g}")
            case "clip":
                norm = recipe.optimizer.max_grad_norm
                return Limit(factor * norm, f"{factor * norm:g} ({factor:g} times optimizer.max_grad_norm = {norm:g})")
            case "lr":
                return Limit(
                    factor * recipe.lr, f"{factor * recipe.lr:g} ({factor:g} times optimizer.lr = {recipe.lr:g})"
                )
            case "start" | "recent":
                drift = DRIFTS[rule.when.against]
                if not (base := baseline(drift, earlier)):
                    return None
                over = "mean of the first" if drift.against == "start" else "median of the last"
                return Limit(factor * base, f"{factor:g} times {base:.4g}, the {over} {drift.steps} steps")
            case "numerics":
                times, why = _differing(recipe)
                return Limit(factor * times, f"{factor * times:g}{why}")
            case "checkpoint":
                value = factor * self._checkpoint_gib + SPARE_GIB
                return Limit(value, f"{value:.2f} GiB ({factor:g} checkpoints and {SPARE_GIB} GiB)")
            case _:
                assert_never(rule.when.against)


def _as_allowed(rule: Rule, setting: HealthRule, recipe: Recipe) -> HealthRule:
    """Return the rule's setting; a disk that the user let through although it is too small stops no run."""
    if rule.when.against == "checkpoint" and setting.tier == "stop" and "disk" in recipe.allow:
        return setting.model_copy(update={"tier": "warn"})
    return setting


def _differing(recipe: Recipe) -> tuple[float, str]:
    """Return the factor by which rollouts and updates may differ more than usual, and the reason."""
    numerics = recipe.numerics
    if numerics.four_bit_inputs("rollout", "train"):
        return MAGNIFIED, " (activations in four bits magnify rounding)"
    if recipe.noise is not None or numerics.of("rollout") != numerics.of("train"):
        return QUANTISED, " (rollouts have other numerics than updates)"
    return 1.0, ""


def outside(rule: Rule, value: float, limit: float) -> bool:
    """Return whether the value is unhealthy; NaN is unhealthy."""
    return math.isnan(value) or (value > limit if rule.side == "above" else value < limit)
