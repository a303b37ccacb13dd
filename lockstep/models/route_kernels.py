"""Triton kernels that choose each token's experts and sort the pairs of token and expert.

Legend: T tokens, K experts of each, R = T · K pairs, E experts.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.ordered_product_kernel import narrow_tile, side_sums
from lockstep.models.overlap import await_input, overlap

PAIRS = 4096
"""Most pairs of token and expert that are sorted at a time."""
PART = 512
"""Inputs of one part of a router's product."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs of token and expert in the order of their experts; those of one expert keep their order. All int32."""

    order_R: Tensor
    """Pair t · K + k of each row."""
    place_R: Tensor
    """Row of each pair."""
    expert_R: Tensor
    """Expert of each row."""
    bounds_E: Tensor
    """First row of each expert, and the number of rows, [E + 1]."""
    top: int

    @property
    def experts(self) -> int:
        return len(self.bounds_E) - 1

    @property
    def each(self) -> float:
        """Rows of an expert, on average."""
        return len(self.order_R) / self.experts


@triton.jit
def _route_kernel(
    given_ptr, bias_ptr, logits_ptr, weight_ptr, index_ptr, tokens, experts, stride, parts,
    TOP: tl.constexpr, SHARED: tl.constexpr, SUMS: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, TOPS: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts, the first of equal ones. SHARED: the weights of the chosen ones sum to 1.

    SUMS: the logits are made first, of sums over parts of the inputs, in order.
    """
    await_input()
    token = tl.program_id(0).to(tl.int64)
    number, k = tl.arange(0, EXPERTS), tl.arange(0, TOPS)
    inside = number < experts
    given_ptr += token * stride
    if SUMS:
        total = tl.zeros([EXPERTS], tl.float32)
        for _ in range(0, parts):
            total += tl.load(given_ptr + number, mask=inside, other=0.0)
            given_ptr += tokens * stride
        if BIAS:
            total += tl.load(bias_ptr + number, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + token * experts + number, rounded, mask=inside)
        logits = tl.where(inside, rounded.to(tl.float32), -float("inf"))
    else:
        logits = tl.load(given_ptr + number, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.max(logits, 0)
    chosen = tl.full([TOPS], -float("inf"), tl.float32)
    left = logits
    for i in tl.static_range(TOP):
        best = tl.max(left, 0)
        at = tl.min(tl.where(left == best, number, experts - 1), 0)  # NaN equals nothing
        chosen = tl.where(k == i, best, chosen)
        left = tl.where(number == at, -float("inf"), left)
        tl.store(index_ptr + token * TOP + i, at)
    share = tl.exp(chosen - peak)
    share = share / (tl.sum(share, 0) if SHARED else tl.sum(tl.exp(logits - peak), 0))
    tl.store(weight_ptr + token * TOP + k, share.to(weight_ptr.dtype.element_ty), mask=k < TOP)


def choose(logits_TE: Tensor, top: int, *, shared: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights [T, K] and numbers (int64) of the experts with the largest logits."""
    return _choose(logits_TE[None], None, None, top, shared, dtype)


def route(
    x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, top: int, *, shared: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits [T, E], and what `choose` returns. A token's do not depend on the number of tokens: sums over PART inputs
    each are added in order.
    """
    sums = side_sums(x_TH, weight_EH, PART, narrow_tile(len(x_TH)))
    logits_TE = x_TH.new_empty(sums.shape[1:])
    return logits_TE, *_choose(sums, bias_E, logits_TE, top, shared, dtype)


def _choose(
    given: Tensor, bias_E: Tensor | None, logits_TE: Tensor | None, top: int, shared: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    parts, tokens, experts = given.shape
    weight_TK = given.new_empty(tokens, top, dtype=dtype)
    index_TK = torch.empty(tokens, top, dtype=torch.int64, device=given.device)
    _route_kernel[(tokens,)](
        given, given if bias_E is None else bias_E, given if logits_TE is None else logits_TE, weight_TK, index_TK, tokens,
        experts, given.stride(1), parts, top, shared, logits_TE is not None, bias_E is not None,
        triton.next_power_of_2(experts), triton.next_power_of_2(top), num_warps=1, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return weight_TK, index_TK


@triton.jit
def _sort_kernel(index_ptr, order_ptr, place_ptr, expert_ptr, bounds_ptr, count, experts, BLOCK: tl.constexpr):
    """Place the pairs of one expert behind those of all before it."""
    await_input()
    expert = tl.program_id(0)
    less = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        less += (tl.load(index_ptr + pair, mask=pair < count, other=experts) < expert).to(tl.int32)
    start = tl.sum(less, 0)
    tl.store(bounds_ptr + expert, start)
    if expert == experts - 1:
        tl.store(bounds_ptr + experts, count)
    for first in range(0, count, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        own = tl.load(index_ptr + pair, mask=pair < count, other=experts) == expert
        row = start + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(order_ptr + row, pair, mask=own)
        tl.store(place_ptr + pair, row, mask=own)
        tl.store(expert_ptr + row, tl.full([BLOCK], 0, tl.int32) + expert, mask=own)
        start += tl.sum(own.to(tl.int32), 0)


def sort_rows(index_TK: Tensor, experts: int) -> Sorted:
    """Sort pairs of token and expert."""
    count, device = index_TK.numel(), index_TK.device
    order_R, place_R, expert_R = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(3))
    bounds_E = torch.empty(experts + 1, dtype=torch.int32, device=device)
    block = min(PAIRS, triton.next_power_of_2(count))
    _sort_kernel[(experts,)](
        index_TK.contiguous(), order_R, place_R, expert_R, bounds_E, count, experts, block,
        num_warps=8 if block > 1024 else 4, **overlap(),
    )  # fmt: skip
    return Sorted(order_R, place_R, expert_R, bounds_E, index_TK.shape[1])


def blocks(rows: Sorted, size: int) -> int:
    """Return the number of programs that `block_of` needs."""
    return -(-len(rows.order_R) // size) + rows.experts - 1


@triton.jit
def block_of(bounds_ptr, number, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a block of sorted rows, its first row, and the end of the expert's rows; not all numbers have rows.

    Expert e's blocks begin at number start(e) // ROWS + e, which leaves room for the blocks of all before it. All blocks of an
    expert run at about the same time: its matrix is read from memory once, however many rows it has.
    """
    each = tl.arange(0, EXPERTS)
    start = tl.load(bounds_ptr + each, mask=each < experts, other=1 << 30)
    expert = tl.sum((start // ROWS + each <= number).to(tl.int32), 0) - 1
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    return expert, start + (number - start // ROWS - expert) * ROWS, end
