"""Triton kernels for gated activations and rotary embeddings: one pass over the memory each, forward and backward.

They round where transformers' layers round, so that a fused model equals the plain one up to the order of sums. No input is
overwritten.

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

FLAT = 2048
"""Entries of one program of a gated activation."""


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
