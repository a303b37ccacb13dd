"""When and how a run evaluates."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Section


class EvalMode(Section):
    """One way to decode in an evaluation; its name is part of the score."""

    name: str = Field(default="greedy", pattern=r"^[a-z0-9_.@-]+$")
    """Label of the scores. Example: greedy, sampled."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    samples: int = Field(default=1, ge=1)
    """Replies per item."""

    @model_validator(mode="after")
    def _greedy_is_one(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 gives the same reply every time; set samples: 1 or a temperature above 0")
        return self


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
    role: Literal["id_probe", "ood_probe"] = "id_probe"
    """Which held-out set."""
    modes: list[EvalMode] = Field(
        default_factory=lambda: [EvalMode(), EvalMode(name="sampled", temperature=1.0)], min_length=1
    )
    """Decoding modes, each a score of its own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest reply; none takes rollout.max_tokens."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [mode.name for mode in self.modes]
        if len(set(names)) < len(names):
            raise ValueError(f"mode names must differ, got {', '.join(names)}")
        return self
