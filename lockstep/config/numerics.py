"""In which precision each phase computes, and the noise that rollouts may get."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from lockstep.config.section import Section

Numeric: TypeAlias = Literal["bf16", "fp32", "mxfp4-w4a16", "mxfp4-w4a4", "nvfp4-w4a16", "nvfp4-w4a4"]
"""bf16 and fp32 are the weights as they are; the others quantise linear layers block by block and compute on the result."""


class Numerics(Section):
    """Precision of each phase. A score carries the one that it was measured in."""

    train: Numeric | None = None
    """Forward and backward of the update; none is the precision of the weights (model.dtype)."""
    rollout: Numeric | None = None
    """Sampling in training; none is as in training."""
    eval: Numeric | None = None
    """Evaluation; none is as in training."""
    scale: Literal["floor", "rceil"] = "floor"
    """Scale of an MXFP4 block: floor is the OCP rule, whose largest values saturate; rceil never saturates."""
    exclude: list[str] = Field(default_factory=list)
    """Names (or their last parts) of linear layers left alone, besides embeddings, head, norms, routers and adapters."""


class Noise(Section):
    """Adaptive quantisation noise (QeRL, arXiv 2510.11696): Gaussian noise on the norm weights of the sampling model alone."""

    sigma_start: float = Field(default=0.01, gt=0)
    """Standard deviation in the first stage that has noise."""
    sigma_end: float = Field(default=0.0001, gt=0)
    """Standard deviation in the last stage; in between it falls by a constant factor."""
    stages: int = Field(default=10, ge=3)
    """Equal parts of the run; the first has no noise."""
    targets: Literal["all", "post_attention"] | list[str] = "all"
    """Which norms: all that feed linear layers, those after attention only, or regular expressions over their names."""
    layer_scale: dict[str, float] = Field(default_factory=dict)
    """Factors on sigma by norm name or regular expression. Example: {"layers\\\\.0\\\\.": 0.5}"""
