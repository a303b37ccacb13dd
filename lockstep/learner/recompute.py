"""Activation checkpointing: layers are computed again in the backward pass, completely or only where that is cheap.

`selective` keeps the outputs of matrix multiplications and attention, and drops those of norms and gated activations. Such an
output is needed for the weight gradient of the next matrix multiplication, but one pass over memory makes it again from the
tensors that the norm or the activation keeps for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.learner.execution import Recompute
from lockstep.models.fused_layers import is_fused, is_gated, set_gate

_ATTRIBUTE = "lockstep_selective"


def set_recompute(model: Any, mode: Recompute) -> None:
    """Set up a transformers model or decoder, in place. Forward passes with gradients must run in `recomputing(it)`."""
    match mode:
        case "none":
            pass
        case "selective":
            setattr(model, _ATTRIBUTE, Selective(model))
        case "full":
            _recompute_layers(model)
        case _:
            assert_never(mode)


def recomputing(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context that a forward pass of the model runs in."""
    selective: Selective | None = getattr(model, _ATTRIBUTE, None)
    return selective if selective is not None and torch.is_grad_enabled() else nullcontext()


def _recompute_layers(model: Any) -> None:
    """Make each decoder layer compute its activations again in the backward pass."""
    # Transformers before 5.23 uses a name that is deprecated since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in model.modules():
        # transformers recomputes only in training mode. Only the layer's own flag is set, so dropout inside it stays off.
        if getattr(layer, "gradient_checkpointing", False):
            layer.training = True


class Selective:
    """A context in which autograd stores, instead of the outputs of cheap parts, how to make them again."""

    def __init__(self, model: nn.Module) -> None:
        """Replace the forward of the model's norms over whole hidden states and of its gated MLPs."""
        self._latest: _Again | None = None
        self._hooks: Any = None
        config: Any = model.config
        hidden = config.get_text_config().hidden_size
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if type(module).__name__.endswith("Norm") and weight is not None and weight.numel() == hidden:
                replaced: Any = module
                replaced.forward = _Cheap(self, module.forward, is_fused(module))
            elif is_gated(module):
                set_gate(module, _Cheap(self, _gate_of(module), is_fused(module)))

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._hooks.__exit__(*failure)
        self._hooks = None
        self._remember(None)

    def run(self, part: Callable[..., Tensor], inputs: tuple[Tensor, ...], lean: bool) -> Tensor:
        """Run a cheap part and remember it until the next. `lean`: it keeps nothing for its backward pass except its inputs."""
        if self._hooks is None or not torch.is_grad_enabled():
            return part(*inputs)
        output = part(*inputs) if lean else checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
        self._remember(_Again(output, part, tuple(x.detach() for x in inputs)))
        return output

    def _remember(self, latest: _Again | None) -> None:
        if self._latest is not None:
            self._latest.output = None
        self._latest = latest

    def _pack(self, tensor: Tensor) -> Any:
        latest = self._latest
        # The remembered output is alive, so nothing else can have its address.
        if latest is not None and tensor.data_ptr() == latest.address and tensor.numel() == latest.count:
            return latest, tensor.shape, tensor.stride()
        return tensor


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    latest, shape, stride = kept
    again: Tensor = latest.value().as_strided(shape, stride)
    return again


class _Again:
    """An output that is made again on request, once for all its readers, and freed after the last of them."""

    def __init__(self, output: Tensor, part: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.output: Tensor | None = output
        """The output, held while it is the latest one."""
        self.address, self.count = output.data_ptr(), output.numel()
        self._part, self._inputs = part, inputs
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._part(*self._inputs)
        return self._value


class _Cheap:
    """A part that runs through Selective. It is a class so that a copy of the model copies it, too."""

    def __init__(self, selective: Selective, part: Callable[..., Tensor], lean: bool) -> None:
        self._selective, self._part, self._lean = selective, part, lean

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._selective.run(self._part, inputs, self._lean)


class _Gate:
    def __init__(self, activation: nn.Module) -> None:
        self._activation = activation

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        product: Tensor = self._activation(gate) * up
        return product


def _gate_of(module: Any) -> Callable[[Tensor, Tensor], Tensor]:
    gate: Callable[[Tensor, Tensor], Tensor] = getattr(module, "lockstep_gate", None) or _Gate(module.act_fn)
    return gate
