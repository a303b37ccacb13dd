"""The sum of fingerprint.py as a Triton kernel: each element is read once, many tensors in one launch."""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128
"""Programs per tensor; each takes every PROGRAMS-th block."""


@triton.jit
def sums_kernel(table_ptr, a_ptr, b_ptr, totals_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """Compute totals[tensor] += Σ (bits_i + 1) · a[i mod BLOCK] · b[i div BLOCK]; integers wrap, so the order does not matter.

    The table has a row for each tensor: address, elements, columns, elements from row to row. Addresses are read here, so that
    the compiler assumes nothing about their alignment and does not join loads that may not be joined.
    """
    row_ptr = table_ptr + tl.program_id(0) * 4
    address, count = tl.load(row_ptr), tl.load(row_ptr + 1).to(tl.int32)
    columns, stride = tl.load(row_ptr + 2).to(tl.int32), tl.load(row_ptr + 3)
    if SIZE == 1:
        bits_ptr = address.to(tl.pointer_type(tl.uint8))
    elif SIZE == 2:
        bits_ptr = address.to(tl.pointer_type(tl.int16))
    elif SIZE == 4:
        bits_ptr = address.to(tl.pointer_type(tl.int32))
    else:
        bits_ptr = address.to(tl.pointer_type(tl.int64))
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for block in range(tl.program_id(1), (count + BLOCK - 1) // BLOCK, EACH):
        index = block * BLOCK + place
        inside = index < count
        row = index // columns
        bits = tl.load(bits_ptr + row.to(tl.int64) * stride + (index - row * columns), mask=inside, other=0).to(
            tl.int64
        )
        if SIZE < 8:
            bits = bits & ((1 << (8 * SIZE)) - 1)  # the sign was extended
        total += tl.where(inside, (bits + 1) * tl.load(b_ptr + block), 0)
    tl.atomic_add(totals_ptr + tl.program_id(0), tl.sum(total * tl.load(a_ptr + place), axis=0))


def tensor_sums(tensors: Sequence[Tensor], a_K: Tensor, b_B: Tensor) -> Tensor:
    """Return the sums of tensors of one device and one element size, int64 in their order; `a_K` and `b_B` are the tables.

    Each has fewer than 2^31 - 4096 elements, which are counted in 32 bits, and is dense or a matrix with adjacent columns.
    """
    device = tensors[0].device
    rows = [(t.data_ptr(), t.numel(), *_lines(t)) for t in tensors]
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    blocks = max(triton.cdiv(t.numel(), len(a_K)) for t in tensors)
    each = min(PROGRAMS, triton.next_power_of_2(max(1, blocks)))  # few values: each is compiled once
    with torch.cuda.device_of(totals):
        sums_kernel[(len(tensors), each)](
            table, a_K, b_B, totals, SIZE=tensors[0].element_size(), BLOCK=len(a_K), EACH=each, num_warps=8
        )
    return totals


def _lines(tensor: Tensor) -> tuple[int, int]:
    """Return columns, and elements from row to row: a dense tensor is one row."""
    if tensor.is_contiguous():
        return max(1, tensor.numel()), 0
    return tensor.shape[1], tensor.stride(0)
