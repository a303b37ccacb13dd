"""Linear layers that read one input, such as query, key and value, in one matrix multiplication forward and backward.

They need adjacent weights, as the native engine arranges them for decoding (rollout/paged/fused.py). One product is larger than
its parts, reads the input once, and its backward pass adds the gradients of the input before it rounds them. Layers that
cannot be joined are called one by one.

Legend: T tokens, I inputs, O outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models import exact

ATTENTION = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")


class OneInput:
    """The layers of a module that read one input. They are looked up at each call, so that adapters may be added later.

    A class of layers with a static method `together(layers, x)`, such as one with an adapter, joins its layers by that, which
    returns None if they cannot be joined.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module, self._names = module, tuple(names)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each layer."""
        layers: list[Any] = [self._module._modules[name] for name in self._names]
        found, kind = None, type(layers[0])
        if all(type(layer) is kind for layer in layers):
            together = getattr(kind, "together", None)
            found = _together(layers, x) if together is None else together(layers, x)
        return tuple(layer(x) for layer in layers) if found is None else found


class AttentionInputs:
    """Stands in for an attention module in its own forward pass: it calls query, key and value one after the other, and all three
    are computed at the first call. A call with another input is served by the layer itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._all, self._kept = module, OneInput(module, ATTENTION), _Kept()
        self.q_proj, self.k_proj, self.v_proj = (partial(self.output, place) for place in range(len(ATTENTION)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_module":  # while a copy of it is made
            raise AttributeError(name)
        return getattr(self._module, name)

    def output(self, place: int, x: Tensor) -> Tensor:
        """Return the output of one of the layers."""
        kept = self._kept
        if place == 0:
            kept.input = None
            first, *kept.outputs = self._all(x)
            kept.input = x
            return first
        if kept.input is not x:
            alone: Tensor = self._module._modules[ATTENTION[place]](x)  # type: ignore[misc]
            return alone
        found = kept.outputs[place - 1]
        if place == len(ATTENTION) - 1:
            kept.input, kept.outputs = None, []
        return found


class _Kept:
    """Outputs for the calls that follow. A copy of a model does not take them along."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.outputs: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()


# --- memory ---------------------------------------------------------------------------------------------------------
def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor whose rows are those of contiguous tensors, without a copy; None if they are not adjacent in memory."""
    first = parts[0].detach()
    if len(parts) == 1:
        return first
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if not (part.is_contiguous() and part.data_ptr() == end and part.untyped_storage().data_ptr() == storage):
            return None
        end += part.numel() * part.element_size()
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors [T, o] as one [T, O]: without a copy if they are its columns in memory."""
    first, columns = parts[0], sum(part.shape[1] for part in parts)
    stride, end = first.stride(0), first.data_ptr()
    for part in parts:
        alike = part.stride() == (stride, 1) and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or part.data_ptr() != end or stride < columns:
            return torch.cat(list(parts), 1)
        end += part.shape[1] * part.element_size()
    return first.as_strided((first.shape[0], columns), (stride, 1))


def bias_of(layers: Sequence[nn.Linear]) -> tuple[Tensor | None, bool]:
    """Return the biases of layers as one tensor, None if they have none, and whether that could be done without a copy."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias_O = adjacent(biases) if biases else None
    return bias_O, len(biases) in (0, len(layers)) and (bias_O is None) == (not biases)


def is_hooked(layer: nn.Module) -> bool:
    """Return whether hooks of a layer would miss a product that is made for it."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


# --- layers without adapters ----------------------------------------------------------------------------------------
def _together(layers: Sequence[nn.Linear], x: Tensor) -> tuple[Tensor, ...] | None:
    if not all(_plain(layer) for layer in layers):
        return None
    weights = [layer.weight for layer in layers]
    weight_OI, (bias_O, joins) = adjacent(weights), bias_of(layers)
    if weight_OI is None or not joins:
        return None
    biases = [layer.bias for layer in layers if layer.bias is not None]
    sizes = tuple(weight.shape[0] for weight in weights)
    function: Any = _Joined
    found = function.apply(x.reshape(-1, x.shape[-1]), weight_OI, bias_O, sizes, *weights, *biases)
    return tuple(part.view(*x.shape[:-1], -1) for part in found)


def _plain(layer: Any) -> bool:
    """Return whether a layer computes nothing but its product."""
    return type(layer) is nn.Linear and exact.is_plain(layer) and not is_hooked(layer)


class _Joined(torch.autograd.Function):
    """x Wᵀ + b of all layers; gradients go to the layers' own weights and biases, which are parts of these."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, sizes: tuple[int, ...], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.sizes = sizes
        linear = exact.linear if exact.enabled() else nn.functional.linear
        outputs: tuple[Tensor, ...] = linear(x_TI, weight_OI, bias_O).split(sizes, 1)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        grad_TO, count = side_by_side(grads), len(ctx.sizes)
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        found: list[Tensor | None] = [None] * len(needs)
        if any(needs[:count]):
            found[:count] = (grad_TO.T @ x_TI).split(ctx.sizes)
        if any(needs[count:]):
            found[count:] = grad_TO.sum(0).split(ctx.sizes)
        kept = [one if need else None for one, need in zip(found, needs, strict=True)]
        return grad_TO @ weight_OI if needs_x else None, None, None, None, *kept
