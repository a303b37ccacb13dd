"""RMS norms, gated activations and rotary embeddings in one pass each, forward and backward (Triton).

They round where transformers' layers round, so that a fused model gives what the plain one gives up to the order of sums.
Nothing that is given is overwritten.

Legend: R rows, H entries of a row, B batch, N heads, T tokens, D head size.
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

TILE = 4096
"""Entries that a program of a norm holds at once."""
PROGRAMS = 512
"""Approximate number of programs of a norm's backward pass: each sums the weight's gradient over its rows."""
FLAT = 2048
"""Entries of one program of a gated activation."""


# --- norms ----------------------------------------------------------------------------------------------------------
class RmsNorm(torch.autograd.Function):
    """x / rms(x) · (offset + weight). `late`: rounded to x's precision once, at the end; else also before the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float, offset: float, late: bool) -> Tensor:
        x_RH = x.reshape(-1, x.shape[-1]).contiguous()
        out_RH, rms_R = torch.empty_like(x_RH), x_RH.new_empty(len(x_RH), dtype=torch.float32)
        size, tile = _norm_tile(x_RH)
        if exact.enabled() and not offset and not late:
            row_norm(None, x_RH, weight_H, epsilon, x_RH, out_RH, rms_R)
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
    x_RH: Tensor | None,
    residual_RH: Tensor,
    weight_H: Tensor,
    epsilon: float,
    sum_RH: Tensor,
    out_RH: Tensor,
    rms_R: Tensor | None = None,
) -> None:
    """Write residual + x to `sum_RH`, its RMS norm times weight to `out_RH`, whose rows may be apart, and 1 / rms to `rms_R`."""
    count, size = residual_RH.shape
    block = triton.next_power_of_2(size)
    _row_norm_kernel[(count,)](
        residual_RH if x_RH is None else x_RH,
        residual_RH,
        weight_H,
        sum_RH,
        out_RH,
        sum_RH if rms_R is None else rms_R,
        out_RH.stride(0),
        epsilon,
        x_RH is not None,
        rms_R is not None,
        size,
        block,
        num_warps=min(16, max(1, block // 512)),
        enable_fp_fusion=False,
    )


@triton.jit
def _row_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    rms_ptr,
    out_stride,
    eps,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute residual + x (rounded, as the model rounds it), and its RMS norm."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    ok = at < SIZE
    value = tl.load(residual_ptr + row + at, mask=ok, other=0.0)
    if ADD:
        value = value + tl.load(x_ptr + row + at, mask=ok, other=0.0)
        tl.store(sum_ptr + row + at, value, mask=ok)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if KEEP:
        tl.store(rms_ptr + tl.program_id(0), scale)
    weight = tl.load(weight_ptr + at, mask=ok, other=0.0)
    out = out_ptr + tl.program_id(0).to(tl.int64) * out_stride
    tl.store(out + at, (wide * scale).to(value.dtype) * weight, mask=ok)


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


# --- gated activations ----------------------------------------------------------------------------------------------
class SiluGate(torch.autograd.Function):
    """silu(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        return _gate(ctx, gate, up, tanh=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _gate_grads(ctx, grads[0], tanh=False)


class GeluGate(torch.autograd.Function):
    """gelu(gate) · up, gelu in its approximation by tanh (Hendrycks & Gimpel, arXiv 1606.08415)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        return _gate(ctx, gate, up, tanh=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _gate_grads(ctx, grads[0], tanh=True)


def _gate(ctx: Any, gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _gate_kernel[(triton.cdiv(gate.numel(), FLAT),)](gate, up, out, gate.numel(), TANH=tanh, BLOCK=FLAT, num_warps=8)
    ctx.save_for_backward(gate, up)
    return out


def _gate_grads(ctx: Any, grad: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    grad, out_gate, out_up = grad.contiguous(), torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), FLAT),)
    _gate_grad_kernel[grid](grad, gate, up, out_gate, out_up, gate.numel(), TANH=tanh, BLOCK=FLAT, num_warps=8)
    return out_gate, out_up


@triton.jit
def activation(x, TANH: tl.constexpr):
    """Return the activation and its slope, fp32."""
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        squashed = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        value = 0.5 * x * (1 + squashed)
        change = 0.5 * (1 + squashed) + 0.5 * x * (1 - squashed * squashed) * slope
    else:
        half = tl.sigmoid(x)
        value = x * half
        change = half * (1 + x * (1 - half))
    return value, change


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, out_ptr, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    gate = tl.load(gate_ptr + at, mask=live, other=0.0)
    up = tl.load(up_ptr + at, mask=live, other=0.0).to(tl.float32)
    value, _ = activation(gate.to(tl.float32), TANH)
    rounded = value.to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + at, (rounded * up).to(gate.dtype), mask=live)


@triton.jit
def _gate_grad_kernel(
    grad_ptr, gate_ptr, up_ptr, out_gate_ptr, out_up_ptr, count, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    grad = tl.load(grad_ptr + at, mask=live, other=0.0)
    gate = tl.load(gate_ptr + at, mask=live, other=0.0)
    up = tl.load(up_ptr + at, mask=live, other=0.0).to(tl.float32)
    value, change = activation(gate.to(tl.float32), TANH)
    wide = grad.to(tl.float32)
    tl.store(out_gate_ptr + at, (wide * up * change).to(gate.dtype), mask=live)
    tl.store(out_up_ptr + at, (wide * value.to(gate.dtype).to(tl.float32)).to(gate.dtype), mask=live)


# --- rotary embeddings ----------------------------------------------------------------------------------------------
class Rotary(torch.autograd.Function):
    """x · cos + rotate_half(x) · sin of queries [B, N, T, D] and keys [B, K, T, D]; cos and sin [1 or B, T, D]."""

    @staticmethod
    def forward(
        ctx: Any, query_BNTD: Tensor, key_BKTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = query_BNTD.shape[0], *cos_BTD.shape[1:]
        ctx.save_for_backward(*(x.expand(shape).contiguous() for x in (cos_BTD, sin_BTD)))
        return _rotate(query_BNTD, key_BKTD, *ctx.to_save, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(*grads, *ctx.saved_tensors, backward=True), None, None


def _rotate(
    query_BNTD: Tensor, key_BKTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, *, backward: bool
) -> tuple[Tensor, Tensor]:
    """Allocate rows of heads end to end, as attention kernels want, whatever the order of the inputs."""
    batch, heads, tokens, size = query_BNTD.shape
    key_heads = key_BKTD.shape[1]
    query_BTND, key_BTKD = query_BNTD.transpose(1, 2).contiguous(), key_BKTD.transpose(1, 2).contiguous()
    out = torch.empty_like(query_BTND), torch.empty_like(key_BTKD)
    _rotary_kernel[(batch * tokens,)](
        query_BTND,
        key_BTKD,
        *out,
        cos_BTD,
        sin_BTD,
        HEADS=heads,
        KEY_HEADS=key_heads,
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(heads),
        KEY_BLOCK=triton.next_power_of_2(key_heads),
        HALF_BLOCK=triton.next_power_of_2(size // 2),
        BACKWARD=backward,
        num_warps=4,
        enable_fp_fusion=False,  # products are rounded before they are added, as transformers' are
    )
    return out[0].transpose(1, 2), out[1].transpose(1, 2)


@triton.jit
def _turn(
    x_ptr,
    out_ptr,
    row,
    angles,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate all heads of one token."""
    head, at = tl.arange(0, BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (at < HALF)
    place = row * (HEADS * HALF * 2) + head * (HALF * 2) + at
    left = tl.load(x_ptr + place, mask=mask, other=0.0)
    right = tl.load(x_ptr + place + HALF, mask=mask, other=0.0)
    a, b = left.to(tl.float32), right.to(tl.float32)
    cos_left, cos_right, sin_left, sin_right = angles
    if BACKWARD:
        new_left = a * cos_left + b * sin_right
        new_right = b * cos_right - a * sin_left
    else:
        new_left = (a * cos_left).to(left.dtype).to(tl.float32) - (b * sin_left).to(left.dtype).to(tl.float32)
        new_right = (b * cos_right).to(left.dtype).to(tl.float32) + (a * sin_right).to(left.dtype).to(tl.float32)
    tl.store(out_ptr + place, new_left.to(left.dtype), mask=mask)
    tl.store(out_ptr + place + HALF, new_right.to(left.dtype), mask=mask)


@triton.jit
def _rotary_kernel(
    query_ptr,
    key_ptr,
    out_query_ptr,
    out_key_ptr,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF_BLOCK)[None, :]
    live = at < HALF
    place = row * (HALF * 2) + at
    cos_left = tl.load(cos_ptr + place, mask=live, other=0.0).to(tl.float32)
    cos_right = tl.load(cos_ptr + place + HALF, mask=live, other=0.0).to(tl.float32)
    sin_left = tl.load(sin_ptr + place, mask=live, other=0.0).to(tl.float32)
    sin_right = tl.load(sin_ptr + place + HALF, mask=live, other=0.0).to(tl.float32)
    angles = cos_left, cos_right, sin_left, sin_right
    _turn(query_ptr, out_query_ptr, row, angles, HEADS, HALF, BLOCK, HALF_BLOCK, BACKWARD)
    _turn(key_ptr, out_key_ptr, row, angles, KEY_HEADS, HALF, KEY_BLOCK, HALF_BLOCK, BACKWARD)
