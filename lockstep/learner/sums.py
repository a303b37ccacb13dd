"""Adds gradients to their sums in fp32, in the order in which they are given, and on a GPU in one pass over the sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

LARGE = 1 << 20
"""Numbers of a sum from which on the kernel is quicker: below, a launch by torch takes less of the host's time."""


@torch.no_grad()
def add_rows_(sum_X: Tensor, rows_NX: Tensor, *, begun: bool = True) -> None:
    """Add rows to a sum one after the other; if it has not begun, the first row is its first value.

    Both are contiguous, and the sum's dtype is at least as wide. A kernel and torch give the same bits.
    """
    kernel = _kernel() if sum_X.is_cuda and sum_X.numel() >= LARGE else None
    if kernel is not None:
        kernel(sum_X, rows_NX, begun)
        return
    for row_X in rows_NX:
        if begun:
            sum_X += row_X
        else:
            sum_X.copy_(row_X)
        begun = True


@cache
def _kernel() -> Callable[[Tensor, Tensor, bool], None] | None:
    try:
        from lockstep.learner.sum_kernel import add_rows_by_kernel_
    except ImportError:  # no Triton: torch reads and writes the sum for each row, and at half the speed
        return None
    return add_rows_by_kernel_
