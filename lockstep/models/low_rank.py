"""Adapters on the experts of a mixture: one pair of low-rank matrices for each expert and each of its two products. And the sum
of a weight and its adapter, for experts or any other layer.

They are modules inside of the experts' own module: `experts.gate_up_adapter` and `experts.down_adapter`. Their matrices lie as
the base's do, so that their product has the base's shape: gpt-oss has inputs before outputs, others outputs before inputs.

Legend: T tokens, E experts, R rank, O outputs, X inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import SyncError
from lockstep.models.known import kind_of_experts

SUFFIX = "_adapter"
ADAPTERS = {"gate_up_proj": "gate_up" + SUFFIX, "down_proj": "down" + SUFFIX}
"""Names of the adapters of an experts' module, by the parameter that each changes."""
STEPS = (2654435769, 1640531527)
"""Parts of 2^32 by which the dither's numbers go on in a column and in a row: 2^32 over the golden ratio, and its complement."""


class Merge(NamedTuple):
    """A weight, the factors A and B of what is added to it, and the tensor that takes the sum."""

    base_OX: Tensor
    down_RX: Tensor
    up_OR: Tensor
    out_OX: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one product, which becomes x W + scaling · (x A) B; each product is rounded by itself."""

    down_ERX: Tensor
    up_EOR: Tensor
    scaling: float

    def added(self, x_TX: Tensor, expert: int) -> Tensor:
        """Return what it adds to one expert's product, [T, O]."""
        linear = torch.nn.functional.linear
        return linear(linear(x_TX, self.down_ERX[expert]) * self.scaling, self.up_EOR[expert])


def adapters_of(experts: Any) -> tuple[LowRank | None, LowRank | None]:
    """Return the active adapters of an experts' module: of the product with gate and up, and with down."""
    found = [experts._modules.get(name) for name in ADAPTERS.values()]
    first, second = (None if one is None else one.active() for one in found)
    return first, second


def sizes_of(experts: Any, parameter: Literal["gate_up_proj", "down_proj"]) -> tuple[int, int, int, bool]:
    """Return the number of experts, outputs and inputs of a product, and whether inputs come before outputs."""
    match kind_of_experts(experts):
        case "packed":
            packed = experts.gate_up if parameter == "gate_up_proj" else experts.down
            return packed.experts, packed.outputs, packed.inputs, True
        case "paired":
            count, inputs, outputs = getattr(experts, parameter).shape
            return count, outputs, inputs, True
        case _:
            count, outputs, inputs = getattr(experts, parameter).shape
            return count, outputs, inputs, False


def is_transposed(down: Tensor) -> bool:
    """Return whether a matrix A lies [E, X, R]. Ranks are below all sizes of the base, so shapes are unambiguous."""
    return down.shape[2] < down.shape[1]


def base_of(layer: str) -> str:
    """Return the parameter that an adapter of this name changes. Example: experts.down_adapter → experts.down_proj"""
    ours = layer.endswith(tuple(f".experts.{name}" for name in ADAPTERS.values()))
    return f"{layer.removesuffix(SUFFIX)}_proj" if ours else f"{layer}.weight"


@torch.no_grad()
def merge(
    name: str, base_OX: Tensor, down_RX: Tensor, up_OR: Tensor, scaling: float, length_O: Tensor | None = None,
    out_OX: Tensor | None = None, *, dithered: bool = False,
) -> Tensor:  # fmt: skip
    """Return base + scaling · up·down in fp32, rounded to the base's dtype; the inputs are not changed. O outputs, X inputs, R
    rank.

    With `length_O` (DoRA) each row of the sum is scaled to that length. Matrices of experts are merged one expert at a time. The
    sum is written to `out_OX` if it is given. `dithered`: a matrix in bf16 is rounded by `dither_into`.
    """
    if base_OX.ndim == 3 and len(base_OX) == len(down_RX) == len(up_OR):
        first, second = (up_OR, down_RX) if is_transposed(down_RX) else (down_RX, up_OR)
        sum_EOX = torch.empty_like(base_OX)
        for expert, made_OX in enumerate(sum_EOX):
            merge(name, base_OX[expert], first[expert], second[expert], scaling, out_OX=made_OX)
        return sum_EOX
    if (up_OR.shape[0], down_RX.shape[-1]) != tuple(base_OX.shape):
        raise SyncError(
            f"adapter matrices of {tuple(up_OR.shape)} and {tuple(down_RX.shape)} do not fit a weight of {tuple(base_OX.shape)}",
            where=name,
            fix="give learner and engine the same model and adapter",
        )
    out_OX = torch.empty_like(base_OX) if out_OX is None else out_OX
    dithered = dithered and out_OX.dtype == torch.bfloat16
    if length_O is None and _merged_by_kernel([Merge(base_OX, down_RX, up_OR, out_OX, scaling)], dithered):
        return out_OX
    sum_OX = torch.addmm(base_OX.float(), up_OR.float(), down_RX.float(), alpha=scaling)
    if length_O is not None:
        sum_OX *= (length_O.float() / torch.linalg.vector_norm(sum_OX, dim=1))[:, None]
    return dither_into(out_OX, sum_OX) if dithered else out_OX.copy_(sum_OX)


def merge_all(merges: Sequence[Merge]) -> None:
    """Merge several layers, dithered, on a GPU in one launch."""
    if not _merged_by_kernel(merges, True):
        for one in merges:
            merge("", one.base_OX, one.down_RX, one.up_OR, one.scaling, out_OX=one.out_OX, dithered=True)


def _merged_by_kernel(merges: Sequence[Merge], dithered: bool) -> bool:
    """Merge layers if the kernel serves, which makes one pass where torch makes a dozen; returns whether it did."""
    weights = [tensor for one in merges for tensor in (one.base_OX, one.out_OX)]
    factors = [tensor for one in merges for tensor in (one.down_RX, one.up_OR)]
    alike = all(one.dtype == torch.bfloat16 and one.is_cuda for one in weights) and len({f.dtype for f in factors}) < 2
    if not merges or not alike or any(one.stride(1) != 1 for one in (*weights, *factors)):
        return False
    kernel = _kernel()
    if kernel is not None:
        kernel(merges, STEPS, dithered=dithered)
    return kernel is not None


@cache
def _kernel() -> Callable[..., None] | None:
    try:
        from lockstep.models.low_rank_kernel import merge_by_kernel
    except ImportError:
        return None
    return merge_by_kernel


def dither_into(out_OX: Tensor, sum_OX: Tensor) -> Tensor:
    """Round fp32 to bf16 up or down by a number that is fixed for each place; returns `out_OX`. `sum_OX` is used up.

    A value that is a share f of a unit above its lower neighbour is rounded up (away from 0) in a share f of the places, evenly
    spread over each row and each column. So a change of a hundredth of a unit changes every hundredth weight by a unit, where
    rounding to the nearest would lose it. Values of bf16 stay. It is stochastic rounding (arXiv 1502.02551) with the same numbers
    at each call.
    """
    outputs, inputs = (
        torch.arange(size, device=sum_OX.device).mul_(step).bitwise_right_shift_(16).bitwise_and_(0xFFFF).int()
        for size, step in zip(sum_OX.shape, STEPS, strict=True)
    )
    bits_OX = sum_OX.view(torch.int32)
    bits_OX += outputs[:, None] ^ inputs
    out_OX.view(torch.int16).copy_(bits_OX.bitwise_right_shift_(16))
    return out_OX
