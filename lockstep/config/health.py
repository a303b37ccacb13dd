"""Health rules of a run: their limits, and when they warn or stop."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.section import Section

Tier: TypeAlias = Literal["off", "warn", "stop"]


class HealthRule(Section):
    """When one rule is broken, and what then happens. A text is short for the tier: `health.clipping: off`."""

    SHORT: ClassVar[str] = "tier"

    tier: Tier
    """off does not look; warn says it once, and again after it was over; stop saves a checkpoint, writes the report and ends the
    run with exit code 3."""
    limit: float = Field(ge=0)
    """Limit of the healthy range, in the rule's unit."""
    steps: int = Field(ge=1)
    """Steps that must be outside, so that a single bad one never stops a run."""
    within: int | None = Field(default=None, ge=1)
    """Count them within the last so many measured steps; none counts steps in a row."""

    @property
    def window(self) -> int:
        return self.within or self.steps

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {cls.SHORT: value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_patience(self) -> Self:
        if self.within is not None and self.within < self.steps:
            raise ValueError(f"steps = {self.steps} cannot be reached within {self.within} steps")
        if self.tier == "stop" and self.steps < 2:
            raise ValueError("steps = 1 and tier = stop: one bad step must not stop a run; set steps to 2 or more")
        return self


class Health(Section):
    """When a run warns of itself, and when it stops. docs/health.md says what each rule means and where its limit comes from."""

    max_unscored: float = Field(default=0.25, ge=0, le=1)
    """Stop at once when a larger share of a step's replies could not be scored; for smaller shares see health.unscored."""
    warn_unscored: float = Field(default=0.01, ge=0, le=1)
    """Warn above this share."""
    selftest_every: int = Field(default=50, ge=1)
    """Steps between tests of the grader on the step's prompts: a right reply must score 1, wrong ones 0, or the run stops."""
    clipping: HealthRule = HealthRule(tier="stop", limit=100, steps=10, within=15)
    """The gradient is clipped more than so many-fold: grad/norm above limit times optimizer.max_grad_norm."""
    grad_spike: HealthRule = HealthRule(tier="warn", limit=10, steps=3)
    """grad/norm above limit times its median over the last 50 steps that had a gradient, of 5 at least."""
    leap: HealthRule = HealthRule(tier="stop", limit=1, steps=2)
    """sync/probe_shift above limit, in steps with a probe (sync.probe_first, sync.probe_every)."""
    mismatch: HealthRule = HealthRule(tier="stop", limit=0.1, steps=5)
    """mismatch/mean_abs_dlogp above limit; above four times that where rollouts have other numerics than updates or noise, above
    ten times where activations are in four bits, which magnify every rounding."""
    mismatch_kl: HealthRule = HealthRule(tier="warn", limit=0.015, steps=5)
    """mismatch/k3 above limit."""
    ess: HealthRule = HealthRule(tier="warn", limit=0.5, steps=3)
    """mismatch/ess_tokens below limit."""
    unscored: HealthRule = HealthRule(tier="stop", limit=0.05, steps=3)
    """reward/unscored above limit."""
    reward_flat: HealthRule = HealthRule(tier="stop", limit=1e-9, steps=10)
    """advantage/nonzero below limit: no reply of the step is better or worse than another: all are wrong, or all right."""
    zero_variance: HealthRule = HealthRule(tier="warn", limit=0.95, steps=10)
    """reward/zero_std_groups above limit."""
    truncation: HealthRule = HealthRule(tier="warn", limit=0.8, steps=10)
    """length/truncated above limit."""
    length_collapse: HealthRule = HealthRule(tier="warn", limit=0.25, steps=5)
    """length/mean below limit times its mean over the first 5 steps."""
    entropy_collapse: HealthRule = HealthRule(tier="warn", limit=0.1, steps=10)
    """entropy/sampled below limit times its mean over the first 5 steps."""
    entropy_explosion: HealthRule = HealthRule(tier="warn", limit=3, steps=5)
    """entropy/sampled above limit times its mean over the first 5 steps."""
    clip_share: HealthRule = HealthRule(tier="warn", limit=0.4, steps=3)
    """ratio/clip_share above limit; not judged for GSPO, whose range is so narrow that half of the replies leave it."""
    kl_reference: HealthRule = HealthRule(tier="warn", limit=1, steps=5)
    """kl/ref above limit."""
    unmoved: HealthRule = HealthRule(tier="warn", limit=0.5, steps=5)
    """weights/changed_tensors below limit in steps whose gradient was not 0."""
    disk: HealthRule = HealthRule(tier="stop", limit=1, steps=2)
    """memory/disk_free_gib is less than so many checkpoints, and 0.25 GiB."""

    @property
    def rules(self) -> dict[str, HealthRule]:
        """By name, in the order of this section."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, HealthRule)}
