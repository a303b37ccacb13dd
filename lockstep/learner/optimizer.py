"""AdamW on fp32 master weights, the learning-rate schedule, and gradient clipping that refuses non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import AdamW
from lockstep.errors import CheckpointError
from lockstep.learner.adamw8bit import AdamW8bit, scale_count


def learning_rate(settings: AdamW, peak: float, step: int, total: int) -> float:
    """The rate of optimizer step `step` (0-based) of `total`: linear warm-up, then the schedule down to its floor."""
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    floor = peak * settings.min_lr_ratio
    done = (step - settings.warmup_steps) / max(1, total - settings.warmup_steps)
    done = min(1.0, done)
    match settings.schedule:
        case "constant":
            return peak
        case "linear":
            return peak + (floor - peak) * done
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))


_MOMENTS = {
    "fp32": ("step", "exp_avg", "exp_avg_sq"),
    "8bit": ("step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
}
"""What AdamW keeps of a weight, by its setting `states`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    norm: float
    """Global gradient norm before clipping."""
    clipped: bool
    skipped: bool
    """The gradient was not finite: nothing was changed."""


class MasterAdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) whose weights are fp32, whatever the parameters' dtype.

    A bf16 parameter has an fp32 master; gradients of all micro-batches are summed in fp32, and after a step the parameter is
    the rounded master. A small learning rate is therefore never lost to rounding. fp32 parameters are their own masters. The
    moments are fp32 too, or 8 bits each (AdamW8bit).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamW) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        wide = (torch.float32, torch.float64)
        self._masters = {
            name: p if p.dtype in wide else nn.Parameter(p.detach().float()) for name, p in self._parameters.items()
        }
        self.collected: list[nn.Parameter] = []
        """Parameters whose gradient of a backward pass is complete, since this was last cleared."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_collector(self._masters[name]))
            parameter.register_post_accumulate_grad_hook(self._note)
        decayed = [m for m in self._masters.values() if m.dim() >= 2]
        others = [m for m in self._masters.values() if m.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw: torch.optim.AdamW | AdamW8bit
        if settings.states == "8bit":
            self._adamw = AdamW8bit(groups, betas=settings.betas, eps=settings.eps)
        else:
            self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)

    def _note(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self.collected.append(parameter)

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """Clip and apply the summed gradients, then clear them. A non-finite gradient changes nothing."""
        for master in self._masters.values():
            if master.grad is None:  # no loss reached it: its gradient is zero, and the moments still decay
                master.grad = torch.zeros_like(master)
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
        norm = float(torch.linalg.vector_norm(norms))  # the one wait for the device
        limit = self._settings.max_grad_norm
        if math.isfinite(norm):
            if norm > limit:
                torch._foreach_mul_(grads, limit / (norm + 1e-6))
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            narrow = [name for name, parameter in self._parameters.items() if self._masters[name] is not parameter]
            if narrow:
                torch._foreach_copy_(
                    [self._parameters[name] for name in narrow], [self._masters[name] for name in narrow]
                )
        self._adamw.zero_grad(set_to_none=True)
        return StepResult(norm, math.isfinite(norm) and norm > limit, not math.isfinite(norm))

    def tensors(self) -> dict[str, Tensor]:
        """The whole state: `master.NAME` (where it is not the parameter itself), and what AdamW keeps of it likewise."""
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                state[f"master.{name}"] = master.detach()
            for key, value in self._adamw.state.get(master, {}).items():
                state[f"{key}.{name}"] = value
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over `tensors()` of an earlier process, bit by bit.

        Raises CheckpointError, before anything is changed, if it is not of these very parameters.
        """
        self._check(state)
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(state[f"master.{name}"])
                self._parameters[name].copy_(master)
            if f"step.{name}" in state:
                # AdamW8bit counts on the host, torch's fused AdamW on the device.
                host = {"step"} if self._settings.states == "8bit" else set()
                self._adamw.state[master] = {
                    key: state[f"{key}.{name}"].to("cpu" if key in host else master.device, copy=True)
                    for key in _MOMENTS[self._settings.states]
                }

    def _check(self, state: Mapping[str, Tensor]) -> None:
        """The state of no step holds at most masters, any other holds everything, in the parameters' shapes."""
        masters = {f"master.{name}" for name, master in self._masters.items() if master is not self._parameters[name]}
        moments = {f"{key}.{name}" for key in _MOMENTS[self._settings.states] for name in self._masters}
        expected = masters | moments if state.keys() - masters else masters
        wrong = {key for key in expected & state.keys() if state[key].shape != self._shape(key)}
        if problems := sorted((expected ^ state.keys()) | wrong):
            raise CheckpointError(
                f"{len(problems)} tensors of the optimizer state are missing, unknown or of another shape",
                where=problems[0],
                fix="resume with the recipe that the run was started with",
            )

    def _shape(self, key: str) -> torch.Size:
        """Of a tensor of the state."""
        kind, name = key.split(".", 1)
        if kind == "step":
            return torch.Size()
        master = self._masters[name]
        return torch.Size([scale_count(master)]) if kind.endswith("_scale") else master.shape


def _collector(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Adds a parameter's gradient to its master's in fp32 as soon as it is complete, and frees it."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return collect
