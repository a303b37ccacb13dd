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

from lockstep.models import exact

FLAT = 1024
"""Entries of a row that one program of a gated activation computes."""


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
    gate_RH, up_RH = _rows(gate), _rows(up)
    (rows, size), room = gate_RH.shape, exact.room()
    out_RH = gate_RH.new_empty(rows, size + room)[:, :size]
    strides = gate_RH.stride(0), up_RH.stride(0), size + room
    _gate_kernel[_grid(gate_RH)](gate_RH, up_RH, out_RH, *strides, size, TANH=tanh, BLOCK=FLAT, num_warps=4)
    ctx.save_for_backward(gate_RH, up_RH)
    out: Any = out_RH.view(gate.shape)
    out.free_columns = room
    result: Tensor = out
    return result


def _gate_grads(ctx: Any, grad: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return both gradients as halves of one tensor, so that layers with one input (one_input.py) need no copy of them."""
    gate_RH, up_RH = ctx.saved_tensors
    (rows, size), grad_RH = gate_RH.shape, _rows(grad)
    out_gate_RH, out_up_RH = gate_RH.new_empty(rows, 2 * size).split(size, 1)
    given = (grad_RH, gate_RH, up_RH)
    strides = (*(one.stride(0) for one in given), 2 * size)
    _gate_grad_kernel[_grid(gate_RH)](
        *given, out_gate_RH, out_up_RH, *strides, size, TANH=tanh, BLOCK=FLAT, num_warps=4
    )
    return out_gate_RH.view(grad.shape), out_up_RH.view(grad.shape)


def _rows(x: Tensor) -> Tensor:
    """Return x as rows of adjacent numbers."""
    x_RH = x.reshape(-1, x.shape[-1])
    return x_RH if x_RH.stride(1) == 1 else x_RH.contiguous()


def _grid(x_RH: Tensor) -> tuple[int, int]:
    return x_RH.shape[0], triton.cdiv(x_RH.shape[1], FLAT)


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
def _gate_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, out_stride, size, TANH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=live, other=0.0)
    up = tl.load(up_ptr + row * up_stride + at, mask=live, other=0.0).to(tl.float32)
    value, _ = activation(gate.to(tl.float32), TANH)
    rounded = value.to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + at, (rounded * up).to(gate.dtype), mask=live)


@triton.jit
def _gate_grad_kernel(
    grad_ptr, gate_ptr, up_ptr, out_gate_ptr, out_up_ptr, grad_stride, gate_stride, up_stride, out_stride, size,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    grad = tl.load(grad_ptr + row * grad_stride + at, mask=live, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=live, other=0.0)
    up = tl.load(up_ptr + row * up_stride + at, mask=live, other=0.0).to(tl.float32)
    value, change = activation(gate.to(tl.float32), TANH)
    wide = grad.to(tl.float32)
    tl.store(out_gate_ptr + row * out_stride + at, (wide * up * change).to(gate.dtype), mask=live)
    tl.store(out_up_ptr + row * out_stride + at, (wide * value.to(gate.dtype).to(tl.float32)).to(gate.dtype), mask=live)


# --- rotary embeddings ----------------------------------------------------------------------------------------------
class Rotary(torch.autograd.Function):
    """x · cos + rotate_half(x) · sin of queries [B, N, T, D] and keys [B, K, T, D]; cos and sin [1 or B, T, D], or D / 2 of each
    token where both halves have the same.
    """

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
    query_BTND, key_BTKD = _tokens(query_BNTD), _tokens(key_BKTD)
    out = query_BTND.new_empty(query_BTND.shape), key_BTKD.new_empty(key_BTKD.shape)
    _rotary_kernel[(batch * tokens,)](
        query_BTND,
        key_BTKD,
        *out,
        cos_BTD,
        sin_BTD,
        query_BTND.stride(1),
        key_BTKD.stride(1),
        HEADS=heads,
        KEY_HEADS=key_heads,
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(heads),
        KEY_BLOCK=triton.next_power_of_2(key_heads),
        HALF_BLOCK=triton.next_power_of_2(size // 2),
        ANGLES=cos_BTD.shape[-1],
        BACKWARD=backward,
        num_warps=4,
        enable_fp_fusion=False,  # products are rounded before they are added, as transformers' are
    )
    return out[0].transpose(1, 2), out[1].transpose(1, 2)


def _tokens(x_BNTD: Tensor) -> Tensor:
    """Return x token by token: without a copy if each token's heads are adjacent, and all tokens are one stride apart."""
    x_BTND = x_BNTD.transpose(1, 2)
    batch, tokens, _, size = x_BTND.shape
    stride = x_BTND.stride(1)
    even = batch == 1 or x_BTND.stride(0) == tokens * stride
    return x_BTND if even and x_BTND.stride()[2:] == (size, 1) else x_BTND.contiguous()


@triton.jit
def _turn(
    x_ptr,
    out_ptr,
    row,
    stride,
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
    given = x_ptr + row * stride + head * (HALF * 2) + at
    left = tl.load(given, mask=mask, other=0.0)
    right = tl.load(given + HALF, mask=mask, other=0.0)
    a, b = left.to(tl.float32), right.to(tl.float32)
    cos_left, cos_right, sin_left, sin_right = angles
    if BACKWARD:
        new_left = a * cos_left + b * sin_right
        new_right = b * cos_right - a * sin_left
    else:
        new_left = (a * cos_left).to(left.dtype).to(tl.float32) - (b * sin_left).to(left.dtype).to(tl.float32)
        new_right = (b * cos_right).to(left.dtype).to(tl.float32) + (a * sin_right).to(left.dtype).to(tl.float32)
    place = out_ptr + row * (HEADS * HALF * 2) + head * (HALF * 2) + at
    tl.store(place, new_left.to(left.dtype), mask=mask)
    tl.store(place + HALF, new_right.to(left.dtype), mask=mask)


@triton.jit
def _rotary_kernel(
    query_ptr,
    key_ptr,
    out_query_ptr,
    out_key_ptr,
    cos_ptr,
    sin_ptr,
    query_stride,
    key_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ANGLES: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF_BLOCK)[None, :]
    live = at < HALF
    place = row * ANGLES + at
    cos_left = tl.load(cos_ptr + place, mask=live, other=0.0).to(tl.float32)
    cos_right = tl.load(cos_ptr + place + ANGLES - HALF, mask=live, other=0.0).to(tl.float32)
    sin_left = tl.load(sin_ptr + place, mask=live, other=0.0).to(tl.float32)
    sin_right = tl.load(sin_ptr + place + ANGLES - HALF, mask=live, other=0.0).to(tl.float32)
    angles = cos_left, cos_right, sin_left, sin_right
    _turn(query_ptr, out_query_ptr, row, query_stride, angles, HEADS, HALF, BLOCK, HALF_BLOCK, BACKWARD)
    _turn(key_ptr, out_key_ptr, row, key_stride, angles, KEY_HEADS, HALF, KEY_BLOCK, HALF_BLOCK, BACKWARD)
