"""Triton kernels for RMS norms: one pass over the memory each, forward and backward.

They round where transformers' layers round, so that a fused model equals the plain one up to the order of sums. No input is
overwritten, except by `norm_heads`.

Legend: R rows, H entries of a row, B rows of a decode step, D head size.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models import exact
from lockstep.models.overlap import await_input, overlap

TILE = 4096
"""Entries that a program of a norm holds at once."""
PROGRAMS = 512
"""Approximate number of programs of a norm's backward pass: each sums the weight's gradient over its rows."""


class RmsNorm(torch.autograd.Function):
    """x / rms(x) · (offset + weight). `late`: rounded to x's precision once, at the end; else also before the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float, offset: float, late: bool) -> Tensor:
        x_RH = x.reshape(-1, x.shape[-1]).contiguous()
        out_RH, rms_R = torch.empty_like(x_RH), x_RH.new_empty(len(x_RH), dtype=torch.float32)
        size, tile = _norm_tile(x_RH)
        if exact.enabled():
            row_norm(None, x_RH, weight_H, epsilon, x_RH, out_RH, rms_R, late=late, offset=offset)
        else:
            grid = (triton.cdiv(len(x_RH), tile["ROWS"]),)
            _norm_kernel[grid](x_RH, weight_H, out_RH, rms_R, len(x_RH), epsilon, offset, size, LATE=late, **tile)
        ctx.save_for_backward(x_RH, weight_H, rms_R)
        ctx.offset, ctx.late = offset, late
        return out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight_H, rms_R = ctx.saved_tensors
        grad_RH = grads[0].reshape(x_RH.shape).contiguous()
        out_RH = torch.empty_like(x_RH)
        size, tile = _norm_tile(x_RH)
        tiles = triton.cdiv(len(x_RH), tile["ROWS"])
        each = triton.next_power_of_2(triton.cdiv(tiles, PROGRAMS))  # few values: each is compiled once
        programs = triton.cdiv(tiles, each)
        sums_PH = x_RH.new_empty(programs if ctx.needs_input_grad[1] else 0, size, dtype=torch.float32)
        given = grad_RH, x_RH, weight_H, rms_R, out_RH, sums_PH, len(x_RH), ctx.offset
        _norm_grad_kernel[(programs,)](*given, size, EACH=each, LATE=ctx.late, WEIGHT=len(sums_PH) > 0, **tile)
        weight = sums_PH.sum(0).to(weight_H.dtype) if len(sums_PH) else None
        return out_RH.view(grads[0].shape), weight, None, None, None


def _norm_tile(x_RH: Tensor) -> tuple[int, dict[str, int]]:
    size = x_RH.shape[1]
    block = triton.next_power_of_2(size)
    return size, {"ROWS": max(1, TILE // block), "BLOCK": block, "num_warps": 8 if block < 16384 else 16}


def row_norm(
    x_RH: Tensor | None, residual_RH: Tensor, weight_H: Tensor, epsilon: float, sum_RH: Tensor, out_RH: Tensor,
    rms_R: Tensor | None = None, *, late: bool = False, offset: float = 0.0, inner_H: Tensor | None = None,
) -> None:  # fmt: skip
    """Write residual + x to `sum_RH`, its RMS norm times weight to `out_RH`, whose rows may be apart, and 1 / rms to `rms_R`.

    `late` and `offset` are those of RmsNorm. With `inner_H`, the weight of a norm alike, x is normed before it is added. x may be
    two halves in fp32, [2, R, H], whose sum is rounded to the residual's precision.
    """
    count, size = residual_RH.shape
    block = triton.next_power_of_2(size)
    _row_norm_kernel[(count,)](
        residual_RH if x_RH is None else x_RH, residual_RH, weight_H, weight_H if inner_H is None else inner_H, sum_RH, out_RH,
        sum_RH if rms_R is None else rms_R, out_RH.stride(0), epsilon, offset, x_RH is not None,
        x_RH is not None and x_RH.dim() == 3, inner_H is not None, rms_R is not None, late, size, block,
        num_warps=min(16, max(1, block // 512)), enable_fp_fusion=False, **overlap(),
    )  # fmt: skip


@triton.jit
def _row_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, inner_ptr, sum_ptr, out_ptr, rms_ptr, out_stride, eps, offset, ADD: tl.constexpr,
    HALVES: tl.constexpr, INNER: tl.constexpr, KEEP: tl.constexpr, LATE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute residual + x (rounded, as the model rounds it), and its RMS norm."""
    await_input()
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    ok = at < SIZE
    value = tl.load(residual_ptr + row + at, mask=ok, other=0.0)
    if ADD:
        x = tl.load(x_ptr + row + at, mask=ok, other=0.0)
        if HALVES:
            other = tl.load(x_ptr + tl.num_programs(0).to(tl.int64) * SIZE + row + at, mask=ok, other=0.0)
            x = (x + other).to(value.dtype)
        if INNER:
            wide = x.to(tl.float32)
            x = scaled(x, tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps), inner_ptr, at, ok, offset, LATE)
        value = value + x
        tl.store(sum_ptr + row + at, value, mask=ok)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if KEEP:
        tl.store(rms_ptr + tl.program_id(0), scale)
    out = out_ptr + tl.program_id(0).to(tl.int64) * out_stride
    tl.store(out + at, scaled(value, scale, weight_ptr, at, ok, offset, LATE), mask=ok)


@triton.jit
def scaled(value, scale, weight_ptr, at, inside, offset, LATE: tl.constexpr):
    """Multiply a row by 1 / rms and the weight, rounded once at the end, or also before the weight."""
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if LATE:
        out = (value.to(tl.float32) * scale * (weight.to(tl.float32) + offset)).to(value.dtype)
    else:
        out = (value.to(tl.float32) * scale).to(value.dtype) * weight
    return out


def norm_heads(
    x_BX: Tensor, query_norm_D: Tensor, key_norm_D: Tensor, epsilon: float, heads: int, kv_heads: int
) -> None:
    """Norm the query and key heads that stand first in each row, in place, with the bits of `row_norm`."""
    size = len(query_norm_D)
    _head_norm_kernel[(len(x_BX), heads + kv_heads)](
        x_BX,
        query_norm_D,
        key_norm_D,
        x_BX.stride(0),
        epsilon,
        heads,
        size,
        triton.next_power_of_2(size),
        num_warps=1,
        enable_fp_fusion=False,
        **overlap(),
    )


@triton.jit
def _head_norm_kernel(
    x_ptr,
    query_ptr,
    key_ptr,
    stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_input()
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    ok = at < SIZE
    place = x_ptr + tl.program_id(0).to(tl.int64) * stride + head * SIZE + at
    value = tl.load(place, mask=ok, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(query_ptr + at, mask=ok, other=0.0)
    if head >= HEADS:
        weight = tl.load(key_ptr + at, mask=ok, other=0.0)
    tl.store(place, (wide * scale).to(value.dtype) * weight, mask=ok)


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rms_ptr,
    rows,
    epsilon,
    offset,
    SIZE: tl.constexpr,
    LATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    here = row < rows
    mask = here[:, None] & (at < SIZE)[None, :]
    place = row[:, None] * SIZE + at[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + epsilon)
    tl.store(rms_ptr + row, inverse, mask=here)
    weight = tl.load(weight_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32) + offset
    scaled = wide * inverse[:, None]
    if not LATE:
        scaled = scaled.to(x.dtype).to(tl.float32)
    tl.store(out_ptr + place, (scaled * weight[None, :]).to(x.dtype), mask=mask)


@triton.jit
def _norm_grad_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    rms_ptr,
    out_ptr,
    sums_ptr,
    rows,
    offset,
    SIZE: tl.constexpr,
    EACH: tl.constexpr,
    LATE: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < SIZE
    weight = tl.load(weight_ptr + at, mask=live, other=0.0).to(tl.float32) + offset
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(EACH):
        row = (program * EACH + number) * ROWS + tl.arange(0, ROWS)
        here = row < rows
        mask = here[:, None] & live[None, :]
        place = row[:, None] * SIZE + at[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(rms_ptr + row, mask=here, other=0.0)
        scaled = x.to(tl.float32) * inverse[:, None]
        if WEIGHT:
            seen = scaled
            if not LATE:
                seen = scaled.to(x.dtype).to(tl.float32)
            total += tl.sum(grad * seen, 0)
        inner = grad * weight[None, :]
        common = tl.sum(inner * scaled, 1) / SIZE
        out = (inner - scaled * common[:, None]) * inverse[:, None]
        tl.store(out_ptr + place, out.to(x.dtype), mask=mask)
    if WEIGHT:
        tl.store(sums_ptr + program * SIZE + at, total, mask=live)
