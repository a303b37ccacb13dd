"""Products of bf16 matrices on a CPU that has no instructions for them.

PyTorch computes them there with plain loops, many times slower than in fp32. Here the factors become fp32, and the result is
rounded once, as on a CPU with such instructions.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch


def has_bf16_products() -> bool:
    """Return whether oneDNN multiplies bf16 matrices on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def speed_up_bf16_products() -> Any:
    """Compute products of bf16 matrices on the CPU by way of fp32, in this process. Returns what keeps this in force."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            library.impl(name, _through_fp32(name), "CPU", with_keyset=True)
        library.impl("addmm_", _added_through_fp32(), "CPU", with_keyset=True)
    return library


def _through_fp32(name: str) -> Any:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: torch.DispatchKeySet, *factors: torch.Tensor, **scales: float) -> Any:
        if factors[0].dtype != torch.bfloat16:
            return kernel.call_boxed(keys, *factors, **scales)
        return kernel.call_boxed(keys, *(factor.float() for factor in factors), **scales).bfloat16()

    return product


def _added_through_fp32() -> Any:
    kernel = torch.library.get_kernel("aten::addmm_", "CPU")

    def product(keys: torch.DispatchKeySet, total: torch.Tensor, *factors: torch.Tensor, **scales: float) -> Any:
        if total.dtype != torch.bfloat16:
            return kernel.call_boxed(keys, total, *factors, **scales)
        single = kernel.call_boxed(keys, total.float(), *(factor.float() for factor in factors), **scales)
        return total.copy_(single)

    return product
