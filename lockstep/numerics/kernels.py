"""Triton kernel for formats.fake_quantise: one pass over the memory, with the same result bit for bit.

Legend: B blocks of a program, K numbers of a block.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.numerics.spec import BLOCK, E2M1_MAX, E4M3_MAX, Format, Scale, divided, top_exponent

NUMBERS = 2048
"""Numbers per program."""
_SCALES = {"floor": 0, "rceil": 1, "ceil": 2}


def fake_quantise(x: Tensor, kind: Format, scale: Scale, per_row: bool, out: Tensor | None) -> Tensor:
    """Compute formats.fake_quantise for fp32, bf16 and fp16. NVFP4 takes a pass before it, for the largest numbers."""
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    size, width = BLOCK[kind], x.shape[-1]
    rows_RX = x.view(-1, width)
    each, programs = NUMBERS // size, triton.cdiv(len(rows_RX) * triton.cdiv(width, size), NUMBERS // size)
    if kind == "mxfp4":
        _mx_kernel[(programs,)](
            x, out, len(rows_RX), width, SCALE=_SCALES[scale], TOP=top_exponent(x.dtype), B=each, K=size, num_warps=4
        )
    else:
        top_R = (rows_RX.abs().amax(-1) if per_row else rows_RX.abs().amax()).float()
        _nv_kernel[(programs,)](
            x,
            out,
            top_R,
            divided(top_R, E2M1_MAX * E4M3_MAX),
            len(rows_RX),
            width,
            PER_ROW=per_row,
            B=each,
            K=size,
            num_warps=4,
        )
    return out


@triton.jit
def _place(rows, width, B: tl.constexpr, K: tl.constexpr):
    """Return the row of each block, the addresses of its numbers, and a mask of those that exist: blocks end with their row."""
    per_row = tl.cdiv(width, K)
    block = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    row = block // per_row
    column = ((block % per_row) * K)[:, None] + tl.arange(0, K)[None, :]
    return row, row[:, None] * width + column, (row < rows)[:, None] & (column < width)


@triton.jit
def _power(exponent):
    """Return 2^exponent for -127 <= exponent <= 127, built from its bits."""
    bits = (exponent + 127) << 23
    return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(y, x):
    """Return the nearest code's number to |y|, ties to even, with the sign of x."""
    size = tl.abs(y)
    code = tl.where(size > 0.25, 0.5, 0.0) + tl.where(size >= 0.75, 0.5, 0.0)
    code += tl.where(size > 1.25, 0.5, 0.0) + tl.where(size >= 1.75, 0.5, 0.0)
    code += tl.where(size > 2.5, 1.0, 0.0) + tl.where(size >= 3.5, 1.0, 0.0) + tl.where(size > 5.0, 2.0, 0.0)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (code.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _mx_kernel(x_ptr, out_ptr, rows, width, SCALE: tl.constexpr, TOP: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    _, place, mask = _place(rows, width, B, K)
    given = tl.load(x_ptr + place, mask=mask, other=0.0)
    x = given.to(tl.float32)
    # Floats without their sign have the order of their bits; NaN and infinity are the largest.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    mantissa = amax & 0x7FFFFF
    exponent = (amax >> 23) - 129
    if SCALE == 1:
        exponent += (mantissa > 0x400000).to(tl.int32)
    elif SCALE == 2:
        exponent += (mantissa > 0).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -127), 125 + (SCALE > 0))
    code = _e2m1(x * _power(-exponent)[:, None], x)
    if SCALE > 0:
        most = tl.where(exponent >= TOP, 3.0, 6.0)[:, None]
        code = tl.minimum(tl.maximum(code, -most), most)
    scale = tl.where(amax >= 0x7F800000, float("nan"), _power(exponent))
    tl.store(out_ptr + place, (code * scale[:, None]).to(given.dtype), mask=mask)


@triton.jit
def _nv_kernel(
    x_ptr, out_ptr, top_ptr, outer_ptr, rows, width, PER_ROW: tl.constexpr, B: tl.constexpr, K: tl.constexpr
):
    row, place, mask = _place(rows, width, B, K)
    given = tl.load(x_ptr + place, mask=mask, other=0.0)
    x = given.to(tl.float32)
    at = row if PER_ROW else row * 0
    top, outer = tl.load(top_ptr + at, mask=row < rows, other=0.0), tl.load(outer_ptr + at, mask=row < rows, other=0.0)
    amax = tl.max(tl.abs(x), 1)
    ratio = tl.div_rn(tl.div_rn(amax, 6.0), tl.where(outer == 0.0, 1.0, outer))
    ratio = tl.minimum(ratio, 448.0)
    step = tl.maximum((ratio.to(tl.int32, bitcast=True) >> 23) - 127, -6) - 3
    # Between 2^23 and 2^24 floats are the whole numbers: adding and subtracting rounds, ties to even.
    inner = ((ratio * _power(-step) + 8388608.0) - 8388608.0) * _power(step)
    scale = inner * outer
    code = _e2m1(tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale)[:, None]), x)
    finite = (top.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    tl.store(out_ptr + place, (code * tl.where(finite, scale, float("nan"))[:, None]).to(given.dtype), mask=mask)
