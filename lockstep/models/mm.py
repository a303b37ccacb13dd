"""Adds matrix products to fp32 sums, without rounding to half precision where the device allows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def add_product_(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add a @ b to an fp32 sum, the factors in half precision; their product is rounded only where torch cannot avoid it."""
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    else:
        _adder(a_MK.device, a_MK.dtype)(sum_MN, a_MK, b_KN)


def _in_place(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    torch.addmm(sum_MN, a_MK, b_KN, out_dtype=torch.float32, out=sum_MN)


def _wide(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    sum_MN += torch.mm(a_MK, b_KN, out_dtype=torch.float32)


def _rounded(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    sum_MN += a_MK @ b_KN


@cache
def _adder(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Find the best one that works here: torch has the first two for CUDA only, and not in every version."""
    a_MK = torch.ones(16, 32, dtype=dtype, device=device)
    b_KN = torch.full((32, 8), 3.0, dtype=dtype, device=device)
    for adder in (_in_place, _wide):
        sum_MN = torch.full((16, 8), 2**-10, device=device)
        try:
            adder(sum_MN, a_MK, b_KN)
        except (NotImplementedError, RuntimeError, TypeError):
            continue
        if bool((sum_MN == 96.0 + 2**-10).all()):
            return adder
    return _rounded
