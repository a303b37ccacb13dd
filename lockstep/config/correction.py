"""Settings of the rollout correction: importance weights, because engine and learner compute different probabilities."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.section import Section


class NoCorrection(Section):
    """The difference between engine and learner is measured and left as it is."""

    kind: Literal["none"] = "none"


class Tis(Section):
    """Truncated importance sampling: each loss is multiplied by min(w, cap), w = π_old / π_rollout, detached; with old_logprobs =
    rollout w = π_θ / π_rollout."""

    kind: Literal["tis"] = "tis"
    level: Literal["token", "sequence", "geometric"] = "token"
    """token: each token's own w; sequence: the product over the response; geometric: its root by length."""
    cap: float = Field(default=2.0, ge=1)
    """Largest weight."""


class Mis(Section):
    """Masked importance sampling: weight w where low <= w <= high, and 0 elsewhere; w = π_old / π_rollout, detached; with
    old_logprobs = rollout w = π_θ / π_rollout."""

    kind: Literal["mis"] = "mis"
    level: Literal["token", "sequence", "geometric"] = "token"
    """token: each token's own w; sequence: the product over the response; geometric: its root by length."""
    low: float = Field(default=0.5, ge=0)
    """Smallest w that is kept."""
    high: float = Field(default=5.0, gt=0)
    """Largest w that is kept."""
    weigh: bool = True
    """Multiply what is kept by w; off only masks."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}: nothing would be kept")
        if not self.low <= 1 <= self.high:
            raise ValueError(f"the band [{self.low:g}, {self.high:g}] leaves out w = 1, the weight of equal policies")
        if self.level == "geometric" and (self.low < 0.8 or self.high > 1.25):
            raise ValueError(
                f"[{self.low:g}, {self.high:g}] is too wide for a geometric mean, which stays within a few percent of 1: "
                "it would keep everything; usual are 0.99 to 1.01, and 0.999 to 1.001 for long replies"
            )
        return self


Correction: TypeAlias = Annotated[NoCorrection | Tis | Mis, Field(discriminator="kind")]
