"""The sum of fingerprint.py as a Triton kernel: each element is read once, many tensors in one launch."""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512
"""Programs per tensor; each takes every PROGRAMS-th block."""
ALIGNMENT = 16
"""Bytes: a load of several elements begins at a multiple of them."""


@triton.jit
def sums_kernel(
    table_ptr, a_ptr, b_ptr, totals_ptr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Compute totals[tensor] += Σ (bits_i + 1) · a[i mod BLOCK] · b[i div BLOCK]; integers wrap, so the order does not matter.

    The table has a row for each tensor: address, elements, columns, elements from row to row. Addresses are read here, so that
    the compiler assumes nothing about their alignment and does not join loads that may not be joined. DENSE: all tensors are
    dense, and begin at a multiple of ALIGNMENT.
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
    first, blocks = tl.program_id(1), (count + BLOCK - 1) // BLOCK
    if DENSE:
        bits_ptr = tl.multiple_of(bits_ptr, 16)
        whole = count // BLOCK
        for block in range(first, whole, EACH):
            total += _wide(tl.load(bits_ptr + (block * BLOCK + place)), SIZE) * tl.load(b_ptr + block)
        first = whole + (first + EACH - whole % EACH) % EACH  # the rest, if it is this program's
    for block in range(first, blocks, EACH):
        index = block * BLOCK + place
        inside = index < count
        row = index // columns
        bits = tl.load(bits_ptr + row.to(tl.int64) * stride + (index - row * columns), mask=inside, other=0)
        total += tl.where(inside, _wide(bits, SIZE) * tl.load(b_ptr + block), 0)
    tl.atomic_add(totals_ptr + tl.program_id(0), tl.sum(total * tl.load(a_ptr + place), axis=0))


@triton.jit
def _wide(bits, SIZE: tl.constexpr):
    """Return bits + 1 as int64."""
    wide = bits.to(tl.int64)
    if SIZE < 8:
        wide = wide & ((1 << (8 * SIZE)) - 1)  # the sign was extended
    return wide + 1


def tensor_sums(tensors: Sequence[Tensor], a_K: Tensor, b_B: Tensor) -> Tensor:
    """Return the sums of tensors of one device and one element size, int64 in their order; `a_K` and `b_B` are the tables.

    Each has fewer than 2^31 - 4096 elements, which are counted in 32 bits, and is dense or a matrix with adjacent columns. Its
    elements may be of any type.
    """
    device = tensors[0].device
    rows = [_row(t) for t in tensors]
    dense = all(count <= columns and address % ALIGNMENT == 0 for address, count, columns, _ in rows)
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    blocks = triton.cdiv(max(count for _, count, _, _ in rows), len(a_K))
    each = min(PROGRAMS, triton.next_power_of_2(max(1, blocks)))  # few values: each is compiled once
    with torch.cuda.device_of(totals):
        sums_kernel[(len(tensors), each)](
            table, a_K, b_B, totals, SIZE=tensors[0].itemsize, BLOCK=len(a_K), EACH=each, DENSE=dense, num_warps=8
        )
    return totals


def _row(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return address, elements, columns, and elements from row to row: a dense tensor is one row."""
    count = tensor.numel()
    if tensor.is_contiguous():
        return tensor.data_ptr(), count, count or 1, 0
    return tensor.data_ptr(), count, tensor.shape[1], tensor.stride(0)
