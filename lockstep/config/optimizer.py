"""Settings of the optimizer and its learning rate. Each kind's settings are declared here and nowhere else."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.adapter import Adapter
from lockstep.config.section import CodePath, Json, Section

Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class _Common(Section):
    """Settings that all optimizers share: learning rate, schedule, gradient clipping."""

    lr: float | None = Field(default=None, ge=0)
    """Peak learning rate; none is 1e-6 for full training and 2e-5 for adapters in RL, 1e-5 and 1e-4 in SFT. The value in force
    is printed with its reason."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The global gradient norm is clipped to this."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the learning rate after the warm-up, over optimizer steps; wsd is constant, then linear at the end."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Linear warm-up as a share of all optimizer steps, instead of warmup_steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this share of lr."""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """Share of the optimizer steps at the end in which the rate falls, two at least (schedule wsd)."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: fp32 masters and moments lie in main memory and pass through the GPU in pieces at each step: 12 bytes a parameter less
    on the GPU under AdamW, in full training. Changes memory and time, not the result."""

    def warmup(self, total: int) -> int:
        """Return the steps of warm-up in a run of `total` optimizer steps."""
        return max(1, round(self.warmup_ratio * total)) if self.warmup_ratio else self.warmup_steps

    @model_validator(mode="after")
    def _schedule_has_an_effect(self) -> Self:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio both set the warm-up: set one of the two")
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ValueError(
                "min_lr_ratio has no effect on a constant schedule; choose linear, cosine or wsd, or leave it out"
            )
        if self.schedule != "wsd" and self.decay_share != type(self).model_fields["decay_share"].default:
            raise ValueError(f"decay_share applies to schedule=wsd only, not to {self.schedule}")
        return self


class AdamW(_Common):
    """AdamW with fp32 master weights."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    states: Literal["fp32", "8bit"] = "fp32"
    """Precision of the two moments. 8bit keeps them in blocks with a scale each: 6 bytes a parameter less, no longer exact."""


class Muon(_Common):
    """Muon for matrices (Jordan et al. 2024), AdamW for embeddings, head, vectors and stacked experts; fp32 master weights."""

    kind: Literal["muon"] = "muon"
    momentum: Share = 0.95
    """Decay of the sum of gradients that is orthogonalised."""
    nesterov: bool = True
    """Look ahead by one step of momentum."""
    iterations: int = Field(default=5, ge=1, le=99)
    """Steps of the Newton-Schulz iteration."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """A matrix A × B moves by lr · 0.2·√max(A, B), as far as AdamW would (arXiv 2502.16982), or by lr · √max(1, A/B)."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Betas of AdamW for the other parameters."""
    eps: float = Field(default=1e-8, gt=0)
    """Epsilon of AdamW for the other parameters."""
    rest_lr_ratio: float = Field(default=1.0, gt=0)
    """AdamW's learning rate as a multiple of lr."""


class PythonOptimizer(_Common):
    """A torch.optim.Optimizer of your own, on fp32 master weights: built as Class(groups, lr=…, **settings)."""

    kind: Literal["python"] = "python"
    path: CodePath
    """file.py:Class"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the class as keyword arguments; names and types are checked against its signature."""
    state_bytes: float = Field(default=8.0, ge=0)
    """Bytes of state for each trained parameter, for the memory plan: 4 for each fp32 number."""

    @model_validator(mode="after")
    def _one_decay(self) -> Self:
        if self.weight_decay and "weight_decay" in self.settings:
            raise ValueError("weight_decay and settings.weight_decay both set the decay: set one of the two")
        return self


Optimizer: TypeAlias = Annotated[AdamW | Muon | PythonOptimizer, Field(discriminator="kind")]


def offload_mistake(optimizer: Optimizer, device: str, adapter: Adapter) -> str:
    """Return why optimizer.offload could not be had; empty if it can."""
    if optimizer.offload == "none":
        return ""
    if device == "cpu":
        return "optimizer.offload=cpu frees memory of a GPU, and device=cpu has none: leave it out"
    if adapter.kind != "none":
        return f"optimizer.offload=cpu would free next to nothing: of {adapter.kind} the state is small; leave it out"
    if optimizer.kind == "python":
        return (
            "optimizer.offload=cpu steps a few weights at a time, and optimizer.kind=python may need all: leave it out"
        )
    return ""


def default_rate(loop: Literal["rl", "sft"], *, adapter: bool) -> float:
    """Return the default learning rate. Adapters need ten times more or higher (Thinking Machines, LoRA 2025)."""
    if loop == "sft":
        return 1e-4 if adapter else 1e-5
    return 2e-5 if adapter else 1e-6
