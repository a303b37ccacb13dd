"""PEFT's LoRA layer with a fused forward and backward pass, plugged in through PEFT's own registry of custom layers.

y = x Wᵀ + b + s · (x Aᵀ) Bᵀ. PEFT scales and adds in separate passes over the whole output; here both are part of the matrix
products (addmm), forward and backward, which saves a fifth of an update on a CPU. Everything else is PEFT's: its files,
switching adapters on and off, merging. Under quantised numerics W and its x are the quantised ones; A and B see the unquantised
x, in the weights' precision.

The native engine stores an adapter's up matrix beside its weight (rollout/paged/fused.py), and layers that read one input below
each other. On a GPU such layers together then compute [x, s x Aᵀ] [W, B]ᵀ, with B zero outside of each layer's own rows and
columns, and in the backward pass the gradients of both inputs in one matrix multiplication, so that the long outputs are written
and read once. A single layer does so if it has more outputs than inputs, or if numerics.exact asks for it.

With adapter.merged the weights have their adapters merged in (models/merged_weights.py), and no product of its own is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor

from lockstep.models import exact
from lockstep.models.merged_weights import ADAPTER, MergedWeight, joined_merged
from lockstep.models.one_input import adjacent, bias_of, is_hooked, side_by_side
from lockstep.numerics.apply import operands


class LoraLinear(Linear):
    """Uses the fused pass while exactly one plain adapter is on; anything else is PEFT's own forward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = self._parts()
        if parts is None or args or kwargs:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        if parts.merged is not None:
            return _with_merged([parts], [parts.merged], x)[0]
        used = operands(parts.base, x)
        used_x, weight = (x, parts.base.weight) if used is None else used
        if x.is_cuda and used is None and (weight.shape[0] > weight.shape[1] or exact.enabled()):
            found = _wide([parts], x)
            if found is not None:
                return found[0]
        flat_TI = x.reshape(-1, x.shape[-1])
        function: Any = _FusedLora
        result: Tensor = function.apply(
            flat_TI, used_x.reshape(flat_TI.shape), weight, parts.base.bias, parts.a, parts.b, parts.scaling
        )
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    def together(layers: Sequence[LoraLinear], x: Tensor) -> tuple[Tensor, ...] | None:
        """Return the outputs of layers with one input; None if one of them needs PEFT's own pass, or another memory."""
        parts = [layer._parts() for layer in layers]
        whole = [one for one in parts if one is not None]
        merged = [one.merged for one in whole if one.merged is not None]
        if len(merged) == len(layers) and not any(map(is_hooked, layers)):
            return _with_merged(whole, merged, x)
        found = [one for one in parts if one is not None and operands(one.base, x) is None]
        alike = len({one.scaling for one in found}) == 1 and not any(map(is_hooked, layers))
        return _wide(found, x) if x.is_cuda and len(found) == len(layers) and alike else None

    def _parts(self) -> _Parts | None:
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        name: str = self.active_adapters[0]
        modules = self._modules  # looked up directly: this is done for each layer of each micro-batch
        a, b = (modules[kind]._modules.get(name) for kind in ("lora_A", "lora_B"))  # type: ignore[union-attr]
        if a is None or b is None or self.lora_variant or self.lora_bias.get(name):
            return None
        base, dropout = modules["base_layer"], modules["lora_dropout"]._modules[name]  # type: ignore[union-attr]
        down, up = a._parameters["weight"], b._parameters["weight"]
        plain = (
            isinstance(dropout, torch.nn.Identity)
            and isinstance(base, torch.nn.Linear)  # not packed in 4 bits
            and down is not None
            and up is not None
            and down.dtype == base.weight.dtype
        )
        if not plain:
            return None
        merged = self.__dict__.get("merged_weight") if name == ADAPTER else None  # an opponent's adapter is not merged
        return _Parts(base, down, up, self.scaling[name], merged)  # type: ignore[arg-type]


class _Parts(NamedTuple):
    """Base layer, matrices and scaling of a layer with one plain adapter."""

    base: torch.nn.Linear
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    scaling: float
    merged: MergedWeight | None = None


class _FusedLora(torch.autograd.Function):
    """A function of x and of the base layer's version of x, whose gradients also go to x (straight-through).

    Legend: T tokens, I inputs, O outputs, R rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        used_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        down_TR = x_TI @ a_RI.T
        ctx.save_for_backward(x_TI, weight_OI, a_RI, b_OR, down_TR)
        ctx.scaling = scaling
        linear = torch.nn.functional.linear
        if x_TI.is_cuda:  # a large product adds to the output while it computes; a small one would wait for memory
            return linear(down_TR * scaling, b_OR, bias_O).addmm_(used_TI, weight_OI.T)
        return linear(used_TI, weight_OI, bias_O).addmm_(down_TR, b_OR.T, alpha=scaling)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grads
        x_TI, weight_OI, a_RI, b_OR, down_TR = ctx.saved_tensors
        grad_down_TR = (grad_TO @ b_OR) * ctx.scaling
        grad_x_TI = None
        if ctx.needs_input_grad[0] and grad_TO.is_cuda:
            grad_x_TI = (grad_down_TR @ a_RI).addmm_(grad_TO, weight_OI)
        elif ctx.needs_input_grad[0]:
            grad_x_TI = (grad_TO @ weight_OI).addmm_(grad_down_TR, a_RI)
        return grad_x_TI, None, None, None, grad_down_TR.T @ x_TI, (grad_TO.T @ down_TR) * ctx.scaling, None


def beside(weights: Sequence[Tensor], ups: Sequence[Tensor]) -> Tensor | None:
    """Return [W, …, B] of layers with one input as one tensor [O, Y], if it is in memory like that: the weights below each other,
    and each up matrix in its weight's rows, in columns behind those of the ones before. The columns of a single layer that are
    between both are not its own.
    """
    first, size, stride = weights[0], weights[0].element_size(), weights[0].stride(0)
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    start = columns = (ups[0].data_ptr() - at) // size
    row = 0
    for weight, up in zip(weights, ups, strict=True):
        if not (
            weight.dtype == up.dtype == first.dtype
            and weight.shape[0] == up.shape[0]
            and weight.stride() == up.stride() == (stride, 1)
            and weight.data_ptr() == at + row * stride * size
            and up.data_ptr() == at + (row * stride + columns) * size
            and weight.untyped_storage().data_ptr() == up.untyped_storage().data_ptr() == storage
        ):
            return None
        row, columns = row + weight.shape[0], columns + up.shape[1]
    if not first.shape[1] <= start <= columns <= stride or (len(weights) > 1 and start != first.shape[1]):
        return None
    return first.detach().as_strided((row, columns), (stride, 1))


def _wide(parts: Sequence[_Parts], x: Tensor) -> tuple[Tensor, ...] | None:
    """Return the outputs of layers with one input and one scaling; None if their memory is not as `beside` needs it.

    Free columns behind the rows of x (`exact.room`) are used by the first call only: the backward pass reads them.
    """
    free = int(x.__dict__.pop("free_columns", 0))
    downs, ups = [one.a for one in parts], [one.b for one in parts]
    wide_OY = beside([one.base.weight for one in parts], ups)
    down_RI = adjacent(downs)
    bias_O, joins = bias_of([one.base for one in parts])
    if wide_OY is None or down_RI is None or not joins:
        return None
    sizes = tuple(up.shape[0] for up in ups), tuple(up.shape[1] for up in ups)
    function: Any = WideLora
    x_TI, scaling = x.reshape(-1, x.shape[-1]), parts[0].scaling
    found = function.apply(x_TI, free, wide_OY, bias_O, down_RI, scaling, *sizes, *downs, *ups)
    return tuple(one.view(*x.shape[:-1], -1) for one in found)


def _with_merged(parts: Sequence[_Parts], merged: Sequence[MergedWeight], x: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of layers with one input and one scaling, whose weights have their adapters merged in."""
    downs, ups = [one.a for one in parts], [one.b for one in parts]
    sizes = tuple(up.shape[0] for up in ups), tuple(up.shape[1] for up in ups)
    bias_O, joins = bias_of([one.base for one in parts])
    if not joins or len({one.scaling for one in parts}) > 1:
        return tuple(_with_merged([one], [weight], x)[0] for one, weight in zip(parts, merged, strict=True))
    function: Any = MergedLora
    x_TI, weight_OI = x.reshape(-1, x.shape[-1]), joined_merged(merged)
    if torch.is_grad_enabled():
        found = function.apply(x_TI, weight_OI, bias_O, parts[0].scaling, *sizes, *downs, *ups)
    else:
        found = torch.nn.functional.linear(x_TI, weight_OI, bias_O).split(sizes[0], 1)
    return tuple(one.view(*x.shape[:-1], -1) for one in found)


class MergedLora(torch.autograd.Function):
    """A function of x with weights that have their adapters merged in: y = x (W + s B A)ᵀ + b. The gradients of A and B are those
    of the sum before it is rounded.

    Legend as for WideLora.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        scaling: float,
        outputs: tuple[int, ...],
        ranks: tuple[int, ...],
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the output of each layer. `adapters`: the matrices that gradients go to, all A and then all B."""
        ctx.save_for_backward(x_TI, weight_OI, *adapters)
        ctx.scaling, ctx.outputs, ctx.ranks = scaling, outputs, ranks
        found: tuple[Tensor, ...] = torch.nn.functional.linear(x_TI, weight_OI, bias_O).split(outputs, 1)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, *adapters = ctx.saved_tensors
        downs, ups = adapters[: len(grads)], adapters[len(grads) :]
        grad_TO = side_by_side(grads)
        grad_x_TI = grad_TO @ weight_OI if ctx.needs_input_grad[0] else None
        down_RI = adjacent(downs)
        down_TR = (x_TI @ (torch.cat(downs) if down_RI is None else down_RI).T) * ctx.scaling
        parts = list(zip(grad_TO.split(ctx.outputs, 1), ups, down_TR.split(ctx.ranks, 1), strict=True))
        grad_down_TR = torch.cat([grad_To @ up_or for grad_To, up_or, _ in parts], 1) * ctx.scaling
        grad_downs = (grad_down_TR.T @ x_TI).split(ctx.ranks)
        return grad_x_TI, *[None] * 5, *grad_downs, *(grad_To.T @ down_Tr for grad_To, _, down_Tr in parts)


class WideLora(torch.autograd.Function):
    """A function like _FusedLora of one layer or several, with up matrices beside weights. The weights get no gradient.

    Legend: Y columns of the weights, of the part between, and of the up matrices; R ranks of all layers together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        free: int,
        wide_OY: Tensor,
        bias_O: Tensor | None,
        down_RI: Tensor,
        scaling: float,
        outputs: tuple[int, ...],
        ranks: tuple[int, ...],
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the output of each layer. `adapters`: the matrices that gradients go to, all A and then all B."""
        (tokens, inputs), (rank, columns) = x_TI.shape, (down_RI.shape[0], wide_OY.shape[1])
        gap = columns - rank - inputs  # the weights there may be any finite numbers; zeros add nothing
        wide_TY = None
        if exact.enabled():
            if free >= rank and not gap:  # by .data: a write behind the rows of x is none to x
                wide_TY = x_TI.data.as_strided((tokens, columns), x_TI.stride())
            down_TR = x_TI.new_empty(tokens, rank) if wide_TY is None else wide_TY[:, inputs:]
            exact.adapter_into(down_TR, x_TI, down_RI, scaling)
        else:
            down_TR = torch.addmm(x_TI.new_empty(()), x_TI, down_RI.T, beta=0, alpha=scaling)
        if wide_TY is None:
            wide_TY = torch.cat([x_TI, *([x_TI.new_zeros(tokens, gap)] if gap else []), down_TR], 1)
            if len(outputs) == 1 and not gap:
                exact.ask_for_room(rank)
        ctx.save_for_backward(x_TI, wide_OY, down_RI, down_TR)
        ctx.scaling, ctx.outputs, ctx.ranks = scaling, outputs, ranks
        linear = exact.linear if exact.enabled() else torch.nn.functional.linear
        found: tuple[Tensor, ...] = linear(wide_TY, wide_OY, bias_O).split(outputs, 1)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, wide_OY, down_RI, down_TR = ctx.saved_tensors
        inputs, rank, grad_x_TI = x_TI.shape[1], down_TR.shape[1], None
        grad_TO = side_by_side(grads)
        if wide_OY.shape[0] > inputs:  # a large gradient is read once; the result has gaps between its rows
            grad_TY = grad_TO @ wide_OY
            grad_x_TI, grad_down_TR = grad_TY[:, :inputs], grad_TY[:, -rank:] * ctx.scaling
        else:
            grad_down_TR = (grad_TO @ wide_OY[:, -rank:]) * ctx.scaling
            if ctx.needs_input_grad[0]:
                grad_x_TI = grad_TO @ wide_OY[:, :inputs]
        if grad_x_TI is not None:
            grad_x_TI.addmm_(grad_down_TR, down_RI)
        downs = (grad_down_TR.T @ x_TI).split(ctx.ranks)
        parts = zip(grad_TO.split(ctx.outputs, 1), down_TR.split(ctx.ranks, 1), strict=True)
        ups = [grad_To.T @ down_Tr for grad_To, down_Tr in parts]
        return grad_x_TI, *[None] * 7, *downs, *ups
