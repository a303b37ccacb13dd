"""Triton kernel that adds rows of narrow numbers to a wide sum.

Legend: N rows, X numbers of a row.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _sum_kernel(sums_ptr, rows_ptr, size, COUNT: tl.constexpr, BEGUN: tl.constexpr, BLOCK: tl.constexpr):
    """Compute sum += row for each row in turn, in registers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    kind = sums_ptr.dtype.element_ty
    rows_ptr += place
    if BEGUN:
        total = tl.load(sums_ptr + place, mask=mask)
    else:
        total = tl.load(rows_ptr, mask=mask).to(kind)
        rows_ptr += size
    for _ in tl.static_range(COUNT if BEGUN else COUNT - 1):
        total += tl.load(rows_ptr, mask=mask).to(kind)
        rows_ptr += size
    tl.store(sums_ptr + place, total, mask=mask)


def add_rows_by_kernel_(sum_X: Tensor, rows_NX: Tensor, begun: bool) -> None:
    """Compute sums.add_rows_, of at least one row of at least one number."""
    assert sum_X.is_contiguous(), "a sum must be contiguous"
    assert rows_NX.is_contiguous(), "rows must be contiguous"
    count, size = rows_NX.shape
    _sum_kernel[(triton.cdiv(size, BLOCK),)](sum_X, rows_NX, size, COUNT=count, BEGUN=begun, BLOCK=BLOCK, num_warps=8)
