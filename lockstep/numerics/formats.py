"""MXFP4 and NVFP4: quantise to four bits and back, in plain torch. Every other implementation here must equal it bit for bit.

MXFP4 (OCP Microscaling Formats v1.0): blocks of 32 numbers along the last dimension share a power of two X (E8M0, 2^-127 to
2^127); each number is X times one of ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} (E2M1), nearest, ties to the even code. NVFP4: blocks of 16
with a scale in E4M3, all of them times one fp32 scale of the tensor, amax / (6·448); see docs/numerics.md for both.

A row whose length is not a multiple of the block is treated as if zeros followed: blocks never reach into the next row. All
numbers that share a scale with a NaN or an infinity become NaN, so that the fault stays visible. Zeros stay zeros.

Legend: K numbers of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import assert_never, cast

import torch
from torch import Tensor

from lockstep.numerics.spec import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    E8M0_HIGH,
    E8M0_LOW,
    Format,
    Scale,
    divided,
    top_exponent,
)

CHUNK = 2**15
"""Numbers that a CPU quantises in one pass."""


def fake_quantise(
    x: Tensor, kind: Format, *, scale: Scale = "floor", per_row: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return x quantised and dequantised, in x's dtype and shape, blocks along the last dimension. There is no gradient.

    `scale` applies to MXFP4; `per_row` gives each row an NVFP4 tensor scale of its own; `out`, contiguous, takes the result.
    Computed in fp32 (fp64 for fp64) and rounded to x's dtype once: exact for MXFP4. On a GPU with Triton in one pass, equal to
    the bit.
    """
    with torch.no_grad():
        if not x.numel():
            return x.clone() if out is None else out
        kernels = _kernels() if x.is_cuda and x.dtype != torch.float64 else None
        if kernels is not None:
            return cast(Tensor, kernels.fake_quantise(x, kind, scale, per_row, out))
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        rows_RX, out_RX = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
        top = None if kind == "mxfp4" or per_row else rows_RX.abs().amax()
        for rows in _spans(rows_RX):
            match kind:
                case "mxfp4":
                    out_RX[rows] = _blockwise_mx(rows_RX[rows], scale)
                case "nvfp4":
                    out_RX[rows] = _blockwise_nv(rows_RX[rows], top)
                case _:
                    assert_never(kind)
        return out


@cache
def _kernels() -> ModuleType | None:
    try:
        from lockstep.numerics import kernels
    except ImportError:  # no Triton: torch's own operations, a dozen passes instead of one
        return None
    return kernels


def round_e2m1(y: Tensor) -> Tensor:
    """Return the nearest of ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, ties to the even code, saturating; sign of zero and NaN are kept."""
    size = y.abs().clamp_(max=E2M1_MAX)
    # Neighbours are 0.5 apart below 2, 1 below 4, then 2. Added to 2^23 times their distance, a float has no room for less, and
    # is rounded to one of them; a tie goes to the even multiple, which is the even code.
    kind, one, fraction = _BITS[size.dtype]
    bits = (
        size.view(kind).clamp(min=one).bitwise_right_shift_(fraction).add_(fraction - 1).bitwise_left_shift_(fraction)
    )
    large = bits.view(size.dtype)
    return size.add_(large).sub_(large).copysign_(y)


_BITS = {torch.float32: (torch.int32, 0x3F800000, 23), torch.float64: (torch.int64, 0x3FF0000000000000, 52)}
"""For each float type: the integer type of its size, the bits of 1.0, the number of fraction bits."""


def round_e4m3(y: Tensor) -> Tensor:
    """Return the nearest E4M3 number of a non-negative fp32 or fp64 tensor, ties to even, saturating at 448; subnormals count."""
    size = y.clamp(max=E4M3_MAX)
    _, exponent = torch.frexp(
        size
    )  # size = m · 2^exponent, 1/2 <= m < 1: four bits of m are kept, the first is implied
    step = power_of_two((exponent - 4).clamp(min=-9), y.dtype)
    return (size / step).round() * step


def block_exponents(amax: Tensor, scale: Scale) -> Tensor:
    """Return log2 X of MXFP4 blocks whose largest magnitudes are `amax` (fp32 or fp64), int32; any value for 0, NaN and
    infinity.

    It uses the bits of the number: a floating log2 is off by one next to powers of two.
    """
    mantissa, exponent = torch.frexp(amax)  # amax = m · 2^e with 1/2 <= m < 1, subnormals too
    match scale:
        case "floor":
            log = exponent - 3
        case "rceil":
            log = exponent - 3 + (mantissa > 0.75).int()  # 6 = 3/4 · 2^3
        case "ceil":
            log = exponent - 3 + (mantissa > 0.5).int()
        case _:
            assert_never(scale)
    return log.clamp(E8M0_LOW, E8M0_HIGH)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponent exactly, for exponents of E8M0, built from its bits: 2^-127 is subnormal in fp32 and pow may flush it."""
    if dtype == torch.float64:
        return ((exponent.long() + 1023) << 52).view(torch.float64)
    bits = (exponent.int() + 127) << 23
    return torch.where(bits == 0, 0x00400000, bits).view(torch.float32)


def _blockwise_mx(rows_RX: Tensor, scale: Scale) -> Tensor:
    blocks_K = _blocks(rows_RX, BLOCK["mxfp4"])
    amax = blocks_K.abs().amax(-1, keepdim=True)
    exponent = block_exponents(amax, scale)
    block_scale = power_of_two(exponent, blocks_K.dtype).masked_fill_(~amax.isfinite(), torch.nan)
    codes_K = round_e2m1(blocks_K * power_of_two(-exponent, blocks_K.dtype))
    if scale != "floor":  # 4X may be one past the largest number of x's dtype where amax rounds up to it
        at_top = exponent >= top_exponent(rows_RX.dtype)
        if at_top.any():
            codes_K = torch.where(at_top, codes_K.clamp(-3.0, 3.0), codes_K)
    return _rows(codes_K.mul_(block_scale), rows_RX)


def _blockwise_nv(rows_RX: Tensor, top: Tensor | None) -> Tensor:
    """Quantise NVFP4 blocks. `top` is the largest magnitude of the tensor; None takes each row's own."""
    blocks_K = _blocks(rows_RX, BLOCK["nvfp4"])
    amax = blocks_K.abs().amax(-1, keepdim=True)
    top = amax.amax(-2, keepdim=True) if top is None else top.to(amax.dtype)
    outer = divided(top, E2M1_MAX * E4M3_MAX)
    inner = round_e4m3(divided(amax, E2M1_MAX) / torch.where(outer == 0, 1.0, outer).to(outer.dtype))
    block_scale = inner * outer
    live = block_scale != 0
    codes_K = round_e2m1(blocks_K / torch.where(live, block_scale, 1.0).to(block_scale.dtype))
    # A block too small for E4M3 has the scale 0, which makes it zeros; a NaN or an infinity has made block_scale NaN.
    return _rows(codes_K.mul_(block_scale.masked_fill(~top.isfinite(), torch.nan)), rows_RX)


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return [..., blocks, K] in fp32 or fp64, rows padded with zeros."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, -x.shape[-1] % size))
    return padded.reshape(*x.shape[:-1], -(-x.shape[-1] // size), size)


def _spans(rows_RX: Tensor) -> Iterator[slice]:
    """Yield groups of rows to compute together: on a CPU small enough that their intermediate results stay in its cache."""
    each = len(rows_RX) if rows_RX.is_cuda else max(1, CHUNK // rows_RX.shape[1])
    for start in range(0, len(rows_RX), each):
        yield slice(start, start + each)


def _rows(blocks_K: Tensor, like: Tensor) -> Tensor:
    return blocks_K.flatten(-2)[..., : like.shape[-1]].to(like.dtype).reshape(like.shape)
