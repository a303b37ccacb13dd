"""Settings of the precision in which each phase computes, and of the noise in rollouts."""

from __future__ import annotations

import re
from typing import Literal, Self, TypeAlias, assert_never

from pydantic import Field, model_validator

from lockstep.config.section import Section

Numeric: TypeAlias = Literal["bf16", "fp32", "mxfp4-w4a16", "mxfp4-w4a4", "nvfp4-w4a16", "nvfp4-w4a4"]
"""bf16 and fp32 use the weights as they are; the others quantise linear layers and experts and compute on the result."""


PLAIN = frozenset({"bf16", "fp32"})
Phase: TypeAlias = Literal["train", "rollout", "eval"]
PHASES: tuple[Phase, ...] = ("train", "rollout", "eval")


class Numerics(Section):
    """Precision of each phase. A score carries the one that it was measured in."""

    train: Numeric | None = None
    """Forward and backward of the update; none is the precision of the weights (model.dtype)."""
    rollout: Numeric | None = None
    """Sampling in training; none is as in training."""
    eval: Numeric | None = None
    """Evaluation; none is as in training."""
    exact: Literal["auto"] | bool = "auto"
    """On a GPU, sampling and training give every token the same log-probability to the last bit (docs/exact.md). Tested when
    the run starts; where it does not hold the run says why and goes on without it. auto is on for mixtures of experts, whose
    tokens would reach other experts after rounding, and off for other models."""
    scale: Literal["floor", "rceil", "ceil"] = "floor"
    """Scale of an MXFP4 block: floor is the OCP rule, whose largest values saturate; rceil is the least that never saturates;
    ceil is a power of two above the largest value."""
    exclude: list[str] = Field(default_factory=list)
    """Linear layers and experts left alone, besides embeddings, head, norms, routers and adapters: names, or consecutive parts
    of them. Example: ["down_proj", "layers.0"]"""

    def of(self, phase: Phase) -> str:
        """Return the numeric that quantises in this phase; empty where it computes in the precision of the weights."""
        named = self._named(phase)
        return "" if named is None or named in PLAIN else named

    def four_bit_inputs(self, *phases: Phase) -> bool:
        """Return whether a phase quantises activations, which magnifies rounding: two correct computations then differ a lot."""
        return any(self.of(phase).endswith("a4") for phase in phases)

    @property
    def plain_named(self) -> str | None:
        """bf16 or fp32 if a phase names it: the weights must have this precision."""
        return next((named for named in (self.train, self.rollout, self.eval) if named in PLAIN), None)

    def label(self, phase: Phase, weights: str) -> str:
        """Return the label of a phase's numerics in a score, given the precision of the weights.

        Examples: "bf16", "mxfp4-w4a4(floor, bf16)", "nvfp4-w4a4(bf16, without down_proj)".
        """
        numeric = self.of(phase)
        if not numeric:
            return weights
        parts: list[str] = [self.scale] if numeric.startswith("mxfp4") else []
        parts.append(weights)
        if self.exclude:
            parts.append(f"without {' '.join(sorted(set(self.exclude)))}")
        return f"{numeric}({', '.join(parts)})"

    def _named(self, phase: Phase) -> Numeric | None:
        match phase:
            case "train":
                return self.train
            case "rollout":
                return self.rollout or self.train
            case "eval":
                return self.eval or self.train
            case _:
                assert_never(phase)

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if {"bf16", "fp32"} <= {self.train, self.rollout, self.eval}:
            raise ValueError("bf16 and fp32 are both named, but the weights are in one of them (model.dtype)")
        quantised = [numeric for numeric in (self.of("train"), self.of("rollout"), self.of("eval")) if numeric]
        if self.exact is True and quantised:
            raise ValueError(f"numerics.exact is on, but a phase computes in {quantised[0]}, which it does not cover")
        if self.exclude and not quantised:
            raise ValueError("numerics.exclude is set, but no phase quantises: it would have no effect")
        if any(not entry.strip(".") for entry in self.exclude):
            raise ValueError("numerics.exclude has an empty name")
        if self.scale != "floor" and not any(numeric.startswith("mxfp4") for numeric in quantised):
            raise ValueError(f"numerics.scale={self.scale}, but no phase computes in mxfp4: it would have no effect")
        return self


def numeric_in(label: str) -> str:
    """Return the numeric that a label of `Numerics.label` names; empty where it is a precision of weights."""
    name, bracket, _ = label.partition("(")
    return name if bracket else ""


class Noise(Section):
    """Adaptive quantisation noise (QeRL, arXiv 2510.11696): Gaussian noise on the norm weights of the sampling model alone."""

    sigma_start: float = Field(default=0.01, gt=0)
    """Standard deviation in the first stage that has noise."""
    sigma_end: float = Field(default=0.0001, gt=0)
    """Standard deviation in the last stage; in between it falls by a constant factor."""
    stages: int = Field(default=10, ge=3)
    """Equal parts of the run's optimizer steps; the first has no noise."""
    targets: Literal["all", "post_attention"] | list[str] = "all"
    """Norms that get noise: all that feed the linear layers of a block, those after attention only, or regular expressions over
    their names. Example: ["layers\\\\.[0-3]\\\\..*layernorm"]"""
    layer_scale: dict[str, float] = Field(default_factory=dict)
    """Factors on sigma by norm name or regular expression. Example: {"layers\\\\.0\\\\.": 0.5}"""

    @model_validator(mode="after")
    def _falls_on_readable_patterns(self) -> Self:
        if self.sigma_end > self.sigma_start:
            raise ValueError(
                f"sigma_end={self.sigma_end:g} is above sigma_start={self.sigma_start:g}: noise must fall over the run"
            )
        if self.targets == []:
            raise ValueError("targets = [] names no norm; use all, post_attention or regular expressions")
        patterns = {"layer_scale": list(self.layer_scale)}
        if isinstance(self.targets, list):
            patterns["targets"] = self.targets
        for setting, chosen in patterns.items():
            for pattern in chosen:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{setting}: {pattern!r} is not a valid regular expression: {error}") from error
        if wrong := [f"{key}: {factor:g}" for key, factor in self.layer_scale.items() if factor < 0]:
            raise ValueError(f"layer_scale has a factor below 0: {', '.join(wrong)}")
        return self
