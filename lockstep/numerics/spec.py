"""The four-bit formats: names, block sizes, largest values, and the operands that each setting quantises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from lockstep.config.numerics import Numeric

Format: TypeAlias = Literal["mxfp4", "nvfp4"]
Scale: TypeAlias = Literal["floor", "rceil", "ceil"]
"""floor: X = 2^(floor(log2 amax) - 2), whose largest values saturate at 6X; rceil: the smallest X with 6X >= amax; ceil: with
4X >= amax.
"""

BLOCK: dict[str, int] = {"mxfp4": 32, "nvfp4": 16}
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_LOW, E8M0_HIGH = -127, 127


@dataclass(frozen=True, slots=True)
class Spec:
    """Formats of the two operands of a linear layer; None leaves one unquantised."""

    weights: Format | None
    activations: Format | None

    @property
    def plain(self) -> bool:
        return self.weights is None


def parse(numeric: Numeric | str) -> Spec:
    """Return the formats of a numeric; bf16, fp32 and the empty name (the weights' own precision) quantise nothing.

    Raises ValueError for another name.
    """
    match numeric:
        case "" | "bf16" | "fp32":
            return Spec(None, None)
        case "mxfp4-w4a16" | "nvfp4-w4a16":
            return Spec(cast(Format, numeric[:5]), None)
        case "mxfp4-w4a4" | "nvfp4-w4a4":
            return Spec(cast(Format, numeric[:5]), cast(Format, numeric[:5]))
        case _:
            raise ValueError(f"{numeric!r} is not a known number format")


def top_exponent(dtype: torch.dtype) -> int:
    """Return the exponent from which blocks cannot hold 4X in `dtype`."""
    return 14 if dtype == torch.float16 else 126 if dtype in (torch.float32, torch.bfloat16) else E8M0_HIGH + 1


def divided(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once on every device: for a plain number, torch's CUDA kernels multiply by its inverse."""
    return x / x.new_full((), number)
