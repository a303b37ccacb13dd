"""PEFT's LoRA layer with a fused forward and backward pass, plugged in through PEFT's own registry of custom layers.

y = x Wᵀ + b + s · (x Aᵀ) Bᵀ. PEFT scales and adds in separate passes over the whole output; here both are part of the matrix
products (addmm), forward and backward, which saves a fifth of an update on a CPU. Everything else is PEFT's: its files,
switching adapters on and off, merging. Under quantised numerics W and its x are the quantised ones; A and B see the unquantised
x, in the weights' precision.

The native engine stores an adapter's up matrix beside its weight (rollout/paged/fused.py). On a GPU a layer with more outputs
than inputs then computes [x, s x Aᵀ] [W, B]ᵀ, and in the backward pass the gradients of both inputs in one matrix
multiplication, so that the long outputs are written and read once.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor

from lockstep.models import exact
from lockstep.numerics.apply import operands


class LoraLinear(Linear):
    """Uses the fused pass while exactly one plain adapter is on; anything else is PEFT's own forward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = self._only_plain_adapter()
        if name is None or args or kwargs:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        base: Any = self.get_base_layer()
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        flat_TI = x.reshape(-1, x.shape[-1])
        used = operands(base, x)
        used_x, weight = (x, base.weight) if used is None else used
        widens = weight.shape[0] > weight.shape[1] or exact.enabled()
        wide_OY = beside(weight, b) if x.is_cuda and used is None and widens else None
        if wide_OY is not None:
            together: Any = WideLora
            widened: Tensor = together.apply(flat_TI, wide_OY, base.bias, a, b, self.scaling[name])
            return widened.view(*x.shape[:-1], -1)
        function: Any = _FusedLora
        result: Tensor = function.apply(
            flat_TI, used_x.reshape(flat_TI.shape), weight, base.bias, a, b, self.scaling[name]
        )
        return result.view(*x.shape[:-1], -1)

    def _only_plain_adapter(self) -> str | None:
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        name: str = self.active_adapters[0]
        if name not in self.lora_A or self.lora_variant or self.lora_bias.get(name):
            return None
        dropout = self.lora_dropout[name]
        plain = (
            isinstance(dropout, torch.nn.Identity)
            and isinstance(self.get_base_layer(), torch.nn.Linear)  # not packed in 4 bits
            and self.lora_A[name].weight.dtype == self.get_base_layer().weight.dtype
        )
        return name if plain else None


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


def beside(weight_OI: Tensor, b_OR: Tensor) -> Tensor | None:
    """Return [W, …, B] as one tensor [O, Y], if their rows are adjacent in memory; the columns between them are not this
    layer's.
    """
    offset = b_OR.data_ptr() - weight_OI.data_ptr()
    start = offset // weight_OI.element_size()
    columns, stride = start + b_OR.shape[1], weight_OI.stride(0)
    joined = (
        weight_OI.dtype == b_OR.dtype
        and weight_OI.untyped_storage().data_ptr() == b_OR.untyped_storage().data_ptr()
        and weight_OI.stride() == b_OR.stride() == (stride, 1)
        and weight_OI.shape[1] <= start
        and columns <= stride
    )
    return weight_OI.detach().as_strided((weight_OI.shape[0], columns), (stride, 1)) if joined else None


class WideLora(torch.autograd.Function):
    """A function like _FusedLora, for a weight with its up matrix beside it. The weight itself gets no gradient.

    Legend: Y columns of the weight, of the part between, and of the up matrix.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, wide_OY: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scaling: float
    ) -> Tensor:
        (tokens, inputs), (rank, columns) = x_TI.shape, (b_OR.shape[1], wide_OY.shape[1])
        if exact.enabled():
            down_TR = x_TI.new_empty(tokens, rank)
            exact.adapter_into(down_TR, x_TI, a_RI, scaling)
        else:
            down_TR = torch.addmm(x_TI.new_empty(()), x_TI, a_RI.T, beta=0, alpha=scaling)
        gap = columns - rank - inputs  # the weights there may be any finite numbers; zeros add nothing
        wide_TY = torch.cat([x_TI, *([x_TI.new_zeros(tokens, gap)] if gap else []), down_TR], 1)
        ctx.save_for_backward(x_TI, wide_OY, a_RI, down_TR)
        ctx.scaling = scaling
        linear = exact.linear if exact.enabled() else torch.nn.functional.linear
        return linear(wide_TY, wide_OY, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grads
        x_TI, wide_OY, a_RI, down_TR = ctx.saved_tensors
        inputs, rank, grad_x_TI = x_TI.shape[1], down_TR.shape[1], None
        if wide_OY.shape[0] > inputs:  # a large gradient is read once; the result has gaps between its rows
            grad_TY = grad_TO @ wide_OY
            grad_x_TI, grad_down_TR = grad_TY[:, :inputs], grad_TY[:, -rank:] * ctx.scaling
        else:
            grad_down_TR = (grad_TO @ wide_OY[:, -rank:]) * ctx.scaling
            if ctx.needs_input_grad[0]:
                grad_x_TI = grad_TO @ wide_OY[:, :inputs]
        if grad_x_TI is not None:
            grad_x_TI.addmm_(grad_down_TR, a_RI)
        return grad_x_TI, None, None, grad_down_TR.T @ x_TI, grad_TO.T @ down_TR, None
