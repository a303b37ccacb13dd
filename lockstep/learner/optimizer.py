"""Optimizer steps on fp32 master weights, with gradient clipping; a step with a non-finite gradient is skipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import Optimizer
from lockstep.errors import CheckpointError
from lockstep.learner.adamw8bit import scale_count
from lockstep.learner.offload import HostState
from lockstep.learner.optimizers import Inner, build_inner, describe_inner
from lockstep.learner.sums import add_rows_

NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
"""Types of plain numbers in the state of a user's optimizer, which are saved as tensors under KEY~TYPE."""
GROUP = "group:"
"""Beginning of the keys of what a user's optimizer keeps in its parameter groups, such as a count of steps."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step."""

    norm: float
    """Global gradient norm before clipping."""
    clipped: bool
    skipped: bool
    """True if the gradient was not finite and nothing was changed."""


class MasterOptimizer:
    """An optimizer whose weights are fp32, whatever the parameters' dtype.

    A bf16 parameter has an fp32 master; gradients of all micro-batches are summed in fp32, and after a step the parameter is
    the rounded master. A small learning rate is therefore never lost to rounding. fp32 parameters are their own masters. The
    recipe chooses the optimizer that makes the steps (learner.optimizers), and whether masters and moments lie in main memory
    (learner.offload).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Optimizer,
        whole: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Build the optimizer. Raises LearnerError for a user's optimizer that cannot be used.

        With `whole`, all parameters of the run, these are one rank's: their summed gradients come by `take_gradient`.
        """
        self._parameters = dict(parameters)
        self._max_grad_norm = settings.max_grad_norm
        offload = settings.offload == "cpu"
        self._masters = {name: _master_of(p, stand_in=offload) for name, p in self._parameters.items()}
        """Hold the gradients; offloaded, the numbers themselves are elsewhere."""
        self.collected: list[nn.Parameter] = []
        """Parameters whose gradient of a backward pass is complete, since this was last cleared."""
        for name, parameter in self._parameters.items() if whole is None else ():
            if self._masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_collector(self._masters[name]))
            parameter.register_post_accumulate_grad_hook(_noter(self.collected))
        self._inner = build_inner(settings, self._masters, whole)
        self._of = {name: inner for inner in self._inner for name in inner.names}
        self._groups = {
            name: group for inner in self._inner if inner.keys is None for name, group in self._grouped(inner)
        }
        self._built = {name: copy.deepcopy(_settings(group)) for name, group in self._groups.items()}
        """A user's parameter group of each master, and what it held at first."""
        self._host = HostState(self._parameters, self._masters, self._inner) if offload else None
        held = "" if self._host is None else self._host.note
        self.note = "; ".join(filter(None, (describe_inner(self._inner, self._masters), held)))
        """Line for the log, unless it is plain AdamW."""

    def _grouped(self, inner: Inner) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each master's name with its parameter group."""
        names = {id(self._masters[name]): name for name in inner.names}
        return ((names[id(one)], group) for group in inner.optimizer.param_groups for one in group["params"])

    def before_backward(self) -> None:
        """Do nothing: nothing is being sent (see ShardedOptimizer)."""

    def exchange(self, senders: int) -> None:
        """Do nothing: all gradients are here already."""

    def take_gradient(self, name: str, total: Tensor) -> None:
        """Set the summed gradient of a parameter."""
        self._masters[name].grad = total

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """Clip and apply the summed gradients, then clear them. A non-finite gradient changes nothing."""
        norms = torch.stack(list(self.norms().values()))
        result = self.apply(float(torch.linalg.vector_norm(norms)), lr)  # the only wait for the device
        self.forget()
        return result

    def norms(self) -> dict[str, Tensor]:
        """Return the norm of each summed gradient, float64."""
        for master in self._masters.values():
            if master.grad is None:  # no loss reached it: its gradient is zero, and the moments still decay
                master.grad = torch.zeros_like(master)
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        if not grads:
            return {}
        return dict(zip(self._masters, (norm.double() for norm in torch._foreach_norm(grads)), strict=True))

    @torch.no_grad()
    def apply(self, norm: float, lr: float) -> StepResult:
        """Clip by the norm of all gradients, and apply them. A non-finite norm changes nothing."""
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        limit = self._max_grad_norm
        if math.isfinite(norm):
            if norm > limit and grads:
                torch._foreach_mul_(grads, limit / (norm + 1e-6))
            for inner in self._inner:
                if self._host is None:
                    inner.step(lr)
                else:
                    self._host.step(inner, lr)
            masters = {} if self._host is not None else self._masters
            narrow = [name for name, master in masters.items() if self._parameters[name] is not master]
            if narrow:
                torch._foreach_copy_(
                    [self._parameters[name] for name in narrow], [self._masters[name] for name in narrow]
                )
        return StepResult(norm, math.isfinite(norm) and norm > limit, not math.isfinite(norm))

    def forget(self) -> None:
        """Drop the gradients that were summed so far."""
        for inner in self._inner:
            inner.optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None
        self.collected.clear()  # remains of the last pass: see _noter

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state: `master.NAME` (if it is not the parameter itself), and the optimizer's state under similar
        names.

        Raises CheckpointError if a user's optimizer stores something that is neither a tensor nor a number.
        """
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                state[f"master.{name}"] = self._master(name)
            for key, value in self._of[name].optimizer.state.get(master, {}).items():
                label, tensor = _stored(key, value, self._of[name])
                state[f"{label}.{name}"] = tensor
        for name, group in self._groups.items():
            for key, value in _settings(group).items():
                if isinstance(value, Tensor) or value != self._built[name].get(key):
                    label, tensor = _stored(f"{GROUP}{key}", value, self._of[name])
                    state[f"{label}.{name}"] = tensor
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over `tensors()` of an earlier process, bit by bit.

        Raises CheckpointError, before anything is changed, if they belong to other parameters.
        """
        self._check(state)
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in self._masters}
        for label, tensor in state.items():
            key, name = label.split(".", 1)
            if key != "master":
                kept[name][key] = tensor
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                own = self._master(name).copy_(state[f"master.{name}"])
                self._parameters[name].copy_(own.to(self._parameters[name].dtype))
            if kept[name]:
                inner, host = self._of[name], {} if self._host is None else self._host.keep(name, kept[name])
                live = dict(_live(k, t, inner, master) for k, t in kept[name].items() if k not in host)
                for key in [key for key in live if key.startswith(GROUP)]:
                    self._groups[name][key.removeprefix(GROUP)] = live.pop(key)
                inner.optimizer.state[master] = live | host

    def _master(self, name: str) -> Tensor:
        """Return a master that is not the parameter."""
        return self._masters[name].detach() if self._host is None else self._host.master(name)

    def _check(self, state: Mapping[str, Tensor]) -> None:
        """Check names and shapes: the state before the first step holds at most masters, any other everything."""
        masters = {f"master.{name}" for name, master in self._masters.items() if master is not self._parameters[name]}
        kept = state.keys() - masters
        if any(inner.keys is None for inner in self._inner):  # a user's optimizer must cover these parameters
            expected = masters | {label for label in kept if label.partition(".")[2] in self._masters}
        else:
            moments = {f"{key}.{name}" for name, inner in self._of.items() for key in inner.keys or ()}
            expected = masters | moments if kept else masters
        wrong = {label for label in expected & state.keys() if state[label].shape != self._shape(label, state)}
        if problems := sorted((expected ^ state.keys()) | wrong):
            raise CheckpointError(
                f"{len(problems)} tensors of the optimizer state are missing, unknown or of another shape",
                where=problems[0],
                fix="resume with the recipe that the run was started with",
            )

    def _shape(self, label: str, state: Mapping[str, Tensor]) -> torch.Size:
        """Return the shape that a tensor of the state must have."""
        key, name = label.split(".", 1)
        master = self._masters[name]
        if key == "master":
            return master.shape
        if self._of[name].keys is None:
            return state[label].shape
        if key == "step":
            return torch.Size()
        return torch.Size([scale_count(master)]) if key.endswith("_scale") else master.shape


def _master_of(parameter: nn.Parameter, *, stand_in: bool) -> nn.Parameter:
    """Return a parameter's master: itself if it is wide enough. A stand-in has the shape, and no memory of its own."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    if stand_in:
        return nn.Parameter(torch.zeros((), device=parameter.device).expand(parameter.shape))
    return nn.Parameter(parameter.detach().float())


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a parameter group holds, but for its parameters and the rate, which the schedule sets."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _stored(key: object, value: object, inner: Inner) -> tuple[str, Tensor]:
    """Return a piece of an optimizer's state with the name under which it is saved."""
    if isinstance(key, str) and not set(key) & set(".~"):
        if isinstance(value, Tensor):
            return key, value
        if type(value).__name__ in NUMBERS:
            return f"{key}~{type(value).__name__}", torch.tensor(value, dtype=NUMBERS[type(value).__name__])
    raise CheckpointError(
        f"the optimizer's state {key!r} is a {type(value).__name__}, which cannot be saved",
        where=inner.path,
        fix="keep tensors and numbers under plain names in self.state[parameter] or in the group",
    )


def _live(label: str, saved: Tensor, inner: Inner, master: nn.Parameter) -> tuple[str, object]:
    """Reverse `_stored`. Counts of steps stay on the host unless the optimizer is fused (as torch's own do)."""
    key, _, number = label.partition("~")
    if number:
        return key, saved.item()
    group = inner.optimizer.param_groups[0]
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return key, saved.to("cpu" if on_host else master.device, copy=True)


def _noter(collected: list[nn.Parameter]) -> Callable[[Tensor], None]:
    """Return a hook that records the parameters whose gradient is complete. It holds only the list: a hook that held the
    optimizer would make a reference cycle, and the parameter would keep itself and the optimizer alive.
    """

    def note(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        collected.append(parameter)

    return note


def _collector(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Return a hook that adds a parameter's gradient to its master's in fp32 as soon as it is complete, and frees it."""

    def collect(parameter: Tensor) -> None:
        # The gradient is removed from the parameter first: if memory runs out for the sum, nothing may remain that would be
        # counted again (learner.oom).
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if master.grad is None:
            master.grad = grad.float()
        elif grad.is_contiguous() and master.grad.is_contiguous():
            add_rows_(master.grad.view(-1), grad.view(1, -1))
        else:
            master.grad += grad

    return collect
