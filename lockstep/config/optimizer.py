"""The optimizer and its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.section import Section


class AdamW(Section):
    """AdamW with fp32 master weights."""

    lr: float | None = Field(default=None, ge=0)
    """Peak learning rate; none is 1e-6 for full training and 2e-5 for adapters. The value in force is printed."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The global gradient norm is clipped to this."""
    states: Literal["fp32", "8bit"] = "fp32"
    """Precision of the two moments. 8bit keeps them in blocks with a scale each: 6 bytes a parameter less, no longer exact."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over optimizer steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this share of lr."""
