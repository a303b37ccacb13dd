"""Settings of health: the rules that warn about or stop a run, a recipe's own rules and ranges, spikes, and the watchdog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, create_model, model_validator

from lockstep.config.metric import Range, Rule, Tier, built_in_rules
from lockstep.config.section import CodePath, Json, Section, ShortSection


class HealthRule(ShortSection):
    """When one rule is broken, and what then happens. A text is short for the tier: `health.clipping: off`."""

    SHORT = "tier"

    tier: Tier
    """off does not look; warn reports it once, and again after it was over; stop saves a checkpoint, writes the report and ends
    the run with exit code 3."""
    limit: float = Field(ge=0)
    """Limit of the healthy range, in the rule's unit."""
    steps: int = Field(ge=1)
    """Steps that must be outside, so that a single bad one never stops a run."""
    within: int | None = Field(default=None, ge=1)
    """Number of latest measured steps in which they are counted; none counts steps in a row."""
    until: int | None = Field(default=None, ge=1)
    """Last step that is judged; none judges all."""

    @property
    def window(self) -> int:
        return self.within or self.steps

    @staticmethod
    def of(rule: Rule) -> HealthRule:
        """Return the settings that a rule comes with."""
        when = rule.when
        return HealthRule(tier=when.tier, limit=rule.limit, steps=when.steps, within=when.within, until=when.until)

    @model_validator(mode="after")
    def _has_patience(self) -> Self:
        if self.within is not None and self.within < self.steps:
            raise ValueError(f"steps={self.steps} cannot be reached within {self.within} steps")
        if self.tier == "stop" and self.steps < 2:
            raise ValueError("steps=1 and tier=stop: one bad step must not stop a run; set steps to 2 or more")
        return self


class Stall(ShortSection):
    """When a phase of a run (rollout, update, evaluation, a write) stands still. `health.stall: off` is short for its tier."""

    SHORT = "tier"

    tier: Tier = "stop"
    """off does not look; warn writes the stacks of all threads and child processes to stall.txt; stop does, and ends the run with
    exit code 9."""
    times: float = Field(default=10.0, gt=1)
    """Allow a phase this many times the longest of its last 20; the items of an evaluation count as progress."""
    least_s: float = Field(default=300.0, gt=0)
    """Allow at least this many seconds."""
    first_s: float = Field(default=7200.0, gt=0)
    """Seconds allowed for the first time of a phase, in which models are compiled and data fetched."""


class Callback(ShortSection):
    """A function from your file that is called after each step: def after_step(history, **settings). A text is short for path."""

    SHORT = "path"

    path: CodePath
    """file.py:function. It gets [(step, metrics), …] of the run so far, the last step at the end, and returns None, or the reason
    to end the run. It runs in this process: one that raises ends the run, one that hangs is the watchdog's."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the function as keyword arguments."""


class Spikes(Section):
    """Updates that are written to spikes.jsonl, with the replies behind them. It changes no number of the run."""

    enabled: bool = True
    """Watch the updates."""
    log_ratio: float = Field(default=5.0, gt=0)
    """A token's |log ratio| above this, of the policy to the one before the update, or of learner to engine."""
    times: float = Field(default=10.0, gt=1)
    """A gradient norm, or a loss above 1, more than this many times its median over the last 50 updates (of 5 at least)."""
    norm: float = Field(default=50.0, gt=0)
    """A gradient norm above this many times optimizer.max_grad_norm."""
    rows: int = Field(default=3, ge=1)
    """Replies of each spike."""


class _Health(Section):
    """When a run warns of itself, and when it stops. docs/health.md says what each rule means and where its limit comes from."""

    max_unscored: float = Field(default=0.25, ge=0, le=1)
    """Stop at once when a larger share of a step's replies could not be scored; for smaller shares see health.unscored."""
    warn_unscored: float = Field(default=0.01, ge=0, le=1)
    """Warn above this share."""
    selftest_every: int = Field(default=50, ge=1)
    """Steps between tests of the grader on the step's prompts: a right reply must score 1, wrong ones 0, or the run stops."""
    garbage: Tier = "stop"
    """Tier of a grader of yours that rewards garbage as much as the reference, for each prompt of that test."""
    smoke_steps: int = Field(default=6, ge=0)
    """Steps after which a table shows whether the run learns at all; 0 prints none."""
    stall: Stall = Stall()
    spikes: Spikes = Spikes()
    callbacks: list[Callback] = Field(default=[])
    """Functions of yours after each step: other records, or stopping rules. Example: [stop.py:when_flat]"""
    rules: dict[str, Rule] = Field(default={})
    """Further rules by name, in the form of lockstep/config/metrics.yaml. Example:
    {cites: {metric: answer/cites, when: {below: 0.2, tier: stop, steps: 5}, meaning: "no source is named"}}"""
    ranges: dict[str, Range] = Field(default={})
    """Healthy ranges by metric, in place of those of docs/metrics.md. Example: {answer/correct: {low: 0.05, high: 0.9}}"""

    @model_validator(mode="after")
    def _rules_are_complete(self) -> Self:
        for name, rule in self.rules.items():
            if name in built_in_rules():
                raise ValueError(f"rules.{name}: a rule of this name is built in; change it by health.{name}")
            if not rule.metric:
                raise ValueError(f"rules.{name}: set its metric")
            HealthRule.of(rule)
        return self

    def in_force(self) -> list[tuple[Rule, HealthRule]]:
        """Return every rule with its settings: those of the table, then the recipe's own."""
        known = [(rule, getattr(self, name)) for name, rule in built_in_rules().items()]
        own = [(rule.model_copy(update={"name": name}), HealthRule.of(rule)) for name, rule in self.rules.items()]
        return known + own


def _help(rule: Rule) -> str:
    """Say when a rule is broken. Example: "grad/norm above limit times optimizer.max_grad_norm: the update …"."""
    times = {
        "fixed": "",
        "clip": " times optimizer.max_grad_norm",
        "lr": " times optimizer.lr",
        "start": " times its mean over the first 5 steps",
        "recent": " times its median over the last 50 steps, of 5 at least",
        "numerics": ", more where rollouts or activations are quantised",
        "checkpoint": " checkpoints and 0.25 GiB",
    }[rule.when.against]
    needs = f" in steps where {' or '.join(rule.needs)} is above 0" if rule.needs else ""
    lost = f"; not judged for {', '.join(rule.not_for)}" if rule.not_for else ""
    return f"{rule.metric} {rule.side} limit{times}{needs}{lost}: {rule.meaning}."


if TYPE_CHECKING:
    Health = _Health
else:  # a setting for each rule of the table
    Health = create_model(
        "Health",
        __base__=_Health,
        __doc__=_Health.__doc__,
        **{
            name: (HealthRule, Field(default=HealthRule.of(rule), description=_help(rule)))
            for name, rule in built_in_rules().items()
        },
    )
