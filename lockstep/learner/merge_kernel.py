"""Triton kernel that merges two partial results of attention, in one pass over the output.

Legend: Q queries, H heads, D head size.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(
    output,
    lse,
    more,
    more_lse,
    output_row,
    more_row,
    lse_head,
    more_lse_head,
    heads,
    size,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    entry = tl.arange(0, SIZE)
    live = head < heads
    old = tl.load(lse + head * lse_head + row, mask=live, other=0.0)
    new = tl.load(more_lse + head * more_lse_head + row, mask=live, other=0.0)
    top = tl.maximum(old, new)
    total = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    mask = live[:, None] & (entry < size)[None, :]
    place = head[:, None] * size + entry[None, :]
    kept = tl.load(output + row * output_row + place, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(more + row * more_row + place, mask=mask, other=0.0).to(tl.float32)
    merged = kept * tl.exp(old - total)[:, None] + added * tl.exp(new - total)[:, None]
    tl.store(output + row * output_row + place, merged.to(output.dtype.element_ty), mask=mask)
    tl.store(lse + head * lse_head + row, total, mask=live)


def merge_by_kernel_(output_QHD: Tensor, lse_HQ: Tensor, more_QHD: Tensor, more_lse_HQ: Tensor) -> None:
    """Compute flash.merge_: rows of heads end to end, log-sum-exps with queries adjacent; slices of larger tensors are
    allowed.
    """
    queries, heads, size = output_QHD.shape
    assert output_QHD.stride()[1:] == more_QHD.stride()[1:] == (size, 1), "heads must be contiguous"
    assert lse_HQ.stride(1) == more_lse_HQ.stride(1) == 1, "queries must be contiguous"
    _merge[(queries,)](
        output_QHD,
        lse_HQ,
        more_QHD,
        more_lse_HQ,
        output_QHD.stride(0),
        more_QHD.stride(0),
        lse_HQ.stride(0),
        more_lse_HQ.stride(0),
        heads,
        size,
        HEADS=triton.next_power_of_2(heads),
        SIZE=triton.next_power_of_2(size),
    )
