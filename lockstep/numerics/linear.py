"""A linear layer on quantised operands, y = DQ(Q(x)) · DQ(Q(W))ᵀ + b, with straight-through gradients.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from lockstep.numerics.formats import fake_quantise
from lockstep.numerics.spec import Scale, Spec, parse


@dataclass(frozen=True, slots=True)
class Quantiser:
    """A numeric with its scale mode. Example: Quantiser("mxfp4-w4a4")"""

    numeric: str
    scale: Scale = "floor"

    @property
    def spec(self) -> Spec:
        return parse(self.numeric)

    def weight(self, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """Return DQ(Q(W)), blocks along inputs, written to `out` if given; W itself if the numeric leaves weights as they are.

        Matrices that an engine stores together (qkv, gate and up) are quantised one by one and then joined: an NVFP4 tensor
        scale belongs to the matrix of the model.
        """
        kind = self.spec.weights
        return weight_OI if kind is None else fake_quantise(weight_OI, kind, scale=self.scale, out=out)

    def activation(self, x: Tensor) -> Tensor:
        """Return DQ(Q(x)), every row (token) by itself, including NVFP4's tensor scale."""
        kind = self.spec.activations
        return x if kind is None else fake_quantise(x, kind, scale=self.scale, per_row=True)


def quantised_linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    quantiser: Quantiser,
    *,
    used_x: Tensor | None = None,
    used_weight: Tensor | None = None,
) -> Tensor:
    """Return DQ(Q(x)) · DQ(Q(W))ᵀ + b, [..., I] to [..., O].

    Gradients are straight-through: those of the product of the quantised operands, passed to x and W unchanged; the bias sees
    no quantisation. `used_x` and `used_weight` are DQ(Q(x)) and DQ(Q(W)) where the caller has them already.
    """
    used_x = quantiser.activation(x) if used_x is None else used_x
    used_weight = quantiser.weight(weight_OI) if used_weight is None else used_weight
    flat_TI, used_TI = x.reshape(-1, x.shape[-1]), used_x.reshape(-1, x.shape[-1])
    function: Any = _StraightThrough
    out_TO: Tensor = function.apply(flat_TI, weight_OI, bias_O, used_TI, used_weight, quantiser)
    return out_TO.view(*x.shape[:-1], -1)


class _StraightThrough(Function):
    """Straight-through product. It stores x unquantised, which is shared, and quantises it again for the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        used_TI: Tensor,
        used_OI: Tensor,
        quantiser: Quantiser,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_TI if needs_weight else None, used_OI if needs_x else None)
        ctx.quantiser = quantiser
        return nn.functional.linear(used_TI, used_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grads
        x_TI, used_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            grad_TO @ used_OI if needs_x else None,
            grad_TO.T @ ctx.quantiser.activation(x_TI) if needs_weight else None,
            grad_TO.sum(0) if needs_bias else None,
            None,
            None,
            None,
        )
