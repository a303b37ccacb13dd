"""Triton kernels between and after the products of a mixture's experts: activation, its gradient, and the sum over experts.

A token's experts are added in the router's order.

Legend: T tokens, K experts of each, R = T · K rows, I inner width, O outputs.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.norm_kernels import scaled
from lockstep.models.overlap import await_input, overlap
from lockstep.models.route_kernels import Sorted


@dataclass(frozen=True, slots=True)
class Activation:
    """The function of gate and up that is the inner state: gate · sigmoid(alpha · gate) · up."""

    paired: bool = False
    """Gate and up alternate, and are clamped; 1 is added to up (gpt-oss). Else all gates come first."""
    limit: float = 0.0
    alpha: float = 1.0


@triton.jit
def activated(gate, up, PAIRED: tl.constexpr, limit, alpha):
    """Compute the inner state in fp32 of rounded gates and ups."""
    if PAIRED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    return gate * (1.0 / (1.0 + tl.exp(-gate * alpha))) * up


@triton.jit
def add_low_rank(
    total, kind: tl.constexpr, low_ptr, up_ptr, row, there, output, inside, expert, rank, by_expert, by_output, by_rank,
    RANK: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add rows of an adapter times the up matrix of their expert to a product, [ROWS, COLUMNS], or the other way round if SIDE:
    both are rounded to `kind` before, and so is the sum, which is returned in fp32.
    """
    place = tl.arange(0, RANK)
    low_at = low_ptr + row.to(tl.int64)[:, None] * rank + place[None, :]
    low = tl.load(low_at, mask=there & (place < rank)[None, :], other=0.0)
    up_at = up_ptr + expert.to(tl.int64) * by_expert + place[:, None] * by_rank + output[None, :] * by_output
    up = tl.load(up_at, mask=(place < rank)[:, None] & inside[None, :], other=0.0)
    added = tl.dot(up.T, low.T, input_precision=PRECISION) if SIDE else tl.dot(low, up, input_precision=PRECISION)
    return (total.to(kind).to(tl.float32) + added.to(kind).to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _halves(ptr, inner, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    """Load one row of gates and ups in fp32."""
    if PAIRED:
        at = tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + at, mask=at < 2 * inner, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        at = tl.arange(0, BLOCK)
        gate = tl.load(ptr + at, mask=at < inner, other=0.0).to(tl.float32)
        up = tl.load(ptr + inner + at, mask=at < inner, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _both(both_ptr, bias_ptr, expert_ptr, row, inner, PAIRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Load gates and ups of one row, with their biases, rounded as they are stored."""
    kind = both_ptr.dtype.element_ty
    gate, up = _halves(both_ptr + row * 2 * inner, inner, PAIRED, BLOCK)
    if BIAS:
        gate_bias, up_bias = _halves(bias_ptr + tl.load(expert_ptr + row) * 2 * inner, inner, PAIRED, BLOCK)
        gate, up = (gate + gate_bias).to(kind).to(tl.float32), (up + up_bias).to(kind).to(tl.float32)
    return gate, up


@triton.jit
def _activate_kernel(
    both_ptr, bias_ptr, expert_ptr, out_ptr, inner, limit, alpha,
    PAIRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    gate, up = _both(both_ptr, bias_ptr, expert_ptr, row, inner, PAIRED, BIAS, BLOCK)
    state = activated(gate, up, PAIRED, limit, alpha)
    tl.store(out_ptr + row * inner + column, state.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_back_kernel(
    both_ptr, bias_ptr, expert_ptr, grad_ptr, factor_ptr, order_ptr, out_ptr, share_ptr, inner, limit, alpha,
    PAIRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn gradients of inner states, without the router's weight, into those of gates and ups, and of the weight."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + row)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    gate, up = _both(both_ptr, bias_ptr, expert_ptr, row, inner, PAIRED, BIAS, BLOCK)
    grad = tl.load(grad_ptr + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    state = activated(gate, up, PAIRED, limit, alpha)
    rounded = state.to(both_ptr.dtype.element_ty).to(tl.float32)
    tl.store(share_ptr + pair, tl.sum(grad * tl.where(inside, rounded, 0.0), 0))
    grad *= tl.load(factor_ptr + pair).to(tl.float32)
    raw, raw_up = gate, up
    if PAIRED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    sigmoid = 1.0 / (1.0 + tl.exp(-gate * alpha))
    gate_grad = grad * up * sigmoid * (1.0 + gate * alpha * (1.0 - sigmoid))
    up_grad = grad * gate * sigmoid
    if PAIRED:
        gate_grad = tl.where(raw <= limit, gate_grad, 0.0)
        up_grad = tl.where((raw_up >= -limit) & (raw_up <= limit), up_grad, 0.0)
    kind = out_ptr.dtype.element_ty
    out_ptr += row * 2 * inner
    if PAIRED:
        at = tl.arange(0, 2 * BLOCK)
        tl.store(out_ptr + at, tl.interleave(gate_grad, up_grad).to(kind), mask=at < 2 * inner)
    else:
        tl.store(out_ptr + column, gate_grad.to(kind), mask=inside)
        tl.store(out_ptr + inner + column, up_grad.to(kind), mask=inside)


def _warps(inner: int) -> int:
    return 4 if inner <= 1024 else 8 if inner <= 2048 else 16


def activate(both_RO: Tensor, bias_EO: Tensor | None, rows: Sorted, activation: Activation) -> Tensor:
    """Return the inner states [R, I] of gates and ups [R, 2 I] without their biases."""
    count, inner = len(both_RO), both_RO.shape[1] // 2
    out_RI = both_RO.new_empty(count, inner)
    _activate_kernel[(count,)](
        both_RO, both_RO if bias_EO is None else bias_EO, rows.expert_R, out_RI, inner, activation.limit, activation.alpha,
        activation.paired, bias_EO is not None, triton.next_power_of_2(inner), num_warps=_warps(inner), enable_fp_fusion=False,
    )  # fmt: skip
    return out_RI


def activate_back(
    both_RO: Tensor, bias_EO: Tensor | None, rows: Sorted, activation: Activation, grad_RI: Tensor, factor_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gates and ups [R, 2 I] and of the router's weights, fp32 [T · K], from the gradient of the inner
    states that lacks the router's weight.
    """
    count, inner = len(both_RO), both_RO.shape[1] // 2
    out_RO, share_R = torch.empty_like(both_RO), both_RO.new_empty(count, dtype=torch.float32)
    _activate_back_kernel[(count,)](
        both_RO, both_RO if bias_EO is None else bias_EO, rows.expert_R, grad_RI.contiguous(), factor_TK.contiguous(),
        rows.order_R, out_RO, share_R, inner, activation.limit, activation.alpha, activation.paired, bias_EO is not None,
        triton.next_power_of_2(inner), num_warps=_warps(inner), enable_fp_fusion=False,
    )  # fmt: skip
    return out_RO, share_R


@triton.jit
def _summed(
    y_ptr, bias_ptr, expert_ptr, factor_ptr, place_ptr, token, column, outputs, kind: tl.constexpr,
    TOP: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a token's sum over its experts, rounded."""
    inside = column < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        row = tl.load(place_ptr + token * TOP + k).to(tl.int64)
        value = tl.load(y_ptr + row * outputs + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + tl.load(expert_ptr + row) * outputs + column, mask=inside, other=0.0)
            value = (value + bias.to(tl.float32)).to(kind).to(tl.float32)
        if FACTOR:
            value *= tl.load(factor_ptr + token * TOP + k).to(tl.float32)
        total += value
    return total.to(kind)


@triton.jit
def _combine_kernel(
    y_ptr, bias_ptr, expert_ptr, factor_ptr, place_ptr, out_ptr, outputs,
    TOP: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_input()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _summed(
        y_ptr, bias_ptr, expert_ptr, factor_ptr, place_ptr, token, column, outputs, out_ptr.dtype.element_ty, TOP, BIAS,
        FACTOR, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + token * outputs + column, total, mask=column < outputs)


@dataclass(frozen=True, slots=True)
class Unsummed:
    """Results of a token's experts, before their sum."""

    y_RO: Tensor
    bias_EO: Tensor | None
    rows: Sorted
    factor_TK: Tensor | None

    def summed(self) -> Tensor:
        """Return each token's sum over its experts [T, O], weighted by the router if there is a factor."""
        y_RO, tokens, outputs = self.y_RO.contiguous(), len(self.y_RO) // self.rows.top, self.y_RO.shape[1]
        out_TO = y_RO.new_empty(tokens, outputs)
        _combine_kernel[(tokens, triton.cdiv(outputs, 1024))](
            *self._given(), out_TO, outputs, *self._constants(), 1024, enable_fp_fusion=False, **overlap()
        )
        return out_TO

    def add_norm(
        self, residual_TO: Tensor, weight_O: Tensor, epsilon: float, sum_TO: Tensor, out_TO: Tensor, *, late: bool
    ) -> None:
        """Write residual + sum to `sum_TO`, and its RMS norm times weight to `out_TO`, as norm_kernels.row_norm does."""
        tokens, outputs = residual_TO.shape
        block = triton.next_power_of_2(outputs)
        _combine_norm_kernel[(tokens,)](
            *self._given(), residual_TO, weight_O, sum_TO, out_TO, outputs, out_TO.stride(0), epsilon, *self._constants(),
            late, block, num_warps=min(16, max(1, block // 512)), enable_fp_fusion=False, **overlap(),
        )  # fmt: skip

    def _given(self) -> tuple[Tensor, ...]:
        y_RO = self.y_RO.contiguous()
        bias = y_RO if self.bias_EO is None else self.bias_EO
        factor = y_RO if self.factor_TK is None else self.factor_TK.contiguous()
        return y_RO, bias, self.rows.expert_R, factor, self.rows.place_R

    def _constants(self) -> tuple[int, bool, bool]:
        return self.rows.top, self.bias_EO is not None, self.factor_TK is not None


@triton.jit
def _combine_norm_kernel(
    y_ptr, bias_ptr, expert_ptr, factor_ptr, place_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, outputs, out_stride, eps,
    TOP: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over a token's experts, add the residual, and norm."""
    await_input()
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < outputs
    kind = sum_ptr.dtype.element_ty
    value = tl.load(residual_ptr + token * outputs + column, mask=inside, other=0.0) + _summed(
        y_ptr, bias_ptr, expert_ptr, factor_ptr, place_ptr, token, column, outputs, kind, TOP, BIAS, FACTOR, BLOCK
    )
    tl.store(sum_ptr + token * outputs + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / outputs + eps)
    out = scaled(value, scale, weight_ptr, column, inside, 0.0, LATE)
    tl.store(out_ptr + token * out_stride + column, out, mask=inside)


def combine(y_RO: Tensor, bias_EO: Tensor | None, rows: Sorted, factor_TK: Tensor | None) -> Tensor:
    """Return each token's sum over its experts [T, O], weighted by the router if there is a factor."""
    return Unsummed(y_RO, bias_EO, rows, factor_TK).summed()
