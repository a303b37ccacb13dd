"""The sum of fingerprint.py as one Triton kernel: each element is read once, in one launch a tensor."""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sum_kernel(bits_ptr, a_ptr, b_ptr, total_ptr, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """total += Σ (bits_i + 1) · a[i mod BLOCK] · b[i div BLOCK] of one block; integers wrap, so the order does not matter."""
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    index = block * BLOCK + place
    inside = index < count
    bits = tl.load(bits_ptr + index, mask=inside, other=0).to(tl.int64)
    if BITS < 64:
        bits = bits & ((1 << BITS) - 1)  # the sign was extended
    weighted = tl.where(inside, (bits + 1) * tl.load(a_ptr + place), 0)
    tl.atomic_add(total_ptr, tl.sum(weighted, axis=0) * tl.load(b_ptr + block))


def add_sum(total: Tensor, bits_T: Tensor, a_K: Tensor, b_B: Tensor) -> None:
    """Add a whole tensor's sum to `total`, one int64; `bits_T` are its bits as integers, `a_K` and `b_B` the tables."""
    block = len(a_K)
    grid = (triton.cdiv(len(bits_T), block),)
    with torch.cuda.device_of(bits_T):
        sum_kernel[grid](bits_T, a_K, b_B, total, len(bits_T), BITS=8 * bits_T.element_size(), BLOCK=block)
