"""Experts of a mixture by grouped products (Triton): rows sorted by expert, and only experts that a row reaches are read.

Decoding takes three launches: gate and up with their activation, down with the router's weight, and the sum over a token's
experts. Training takes grouped products with gradients. Nothing waits for the host, so both can be captured. Off unless
`use_expert_kernels` is called: they were compared with plain code by Triton's interpreter, and not yet run on a GPU.

Legend: T tokens, K experts of each, R = T · K rows, E experts, H hidden, I inner width, O outputs, X inputs.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

ROWS, COLUMNS, DEPTH = 16, 64, 64
"""Rows, outputs and inputs of a program's step. Decoding has few rows an expert: the smallest tile of a matrix instruction."""
OUTER = 64
"""Outputs and inputs of a program of the weights' gradient."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """Rows in the order of their experts, cut into tiles of one expert each."""

    order_R: Tensor
    """Pair t · K + k of each row."""
    expert_P: Tensor
    """int32: the expert of each tile, -1 for tiles that are not needed."""
    start_P: Tensor
    end_P: Tensor
    bounds_E: Tensor
    """int32 [E + 1]: where the rows of each expert begin."""
    top: int


def sort_rows(index_TK: Tensor, experts: int) -> Sorted:
    """Sort pairs of token and expert. There are as many tiles as the rows could need at most."""
    flat_R = index_TK.reshape(-1)
    order_R = torch.argsort(flat_R, stable=True)
    counts_E = torch.zeros(experts, dtype=torch.int64, device=flat_R.device)
    counts_E.scatter_add_(0, flat_R, torch.ones_like(flat_R))
    bounds_E = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    tiles_E = (counts_E + ROWS - 1) // ROWS
    ends_E = tiles_E.cumsum(0)
    tile_P = torch.arange(flat_R.numel() // ROWS + min(experts, flat_R.numel()), device=flat_R.device)
    expert_P = torch.searchsorted(ends_E, tile_P, right=True)
    own_P = expert_P.clamp(max=experts - 1)
    start_P = bounds_E[own_P] + (tile_P - (ends_E - tiles_E)[own_P]) * ROWS
    end_P = torch.minimum(start_P + ROWS, bounds_E[own_P + 1])
    needed_P = torch.where(expert_P < experts, expert_P, -1)
    expert_P, start_P, end_P, bounds_E = (x.to(torch.int32) for x in (needed_P, start_P, end_P, bounds_E))
    return Sorted(order_R, expert_P, start_P, end_P, bounds_E, index_TK.shape[1])


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, expert_ptr, start_ptr, end_ptr, hidden, inner, x_stride,
    by_expert, by_output, by_input, limit, alpha,
    TOP: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the activated inner states, in sorted order. PAIRED is gpt-oss: gate and up alternate, have biases,
    and are clamped.
    """
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        row = tl.load(start_ptr + tile) + tl.arange(0, ROWS)
        there = row < tl.load(end_ptr + tile)
        token = tl.load(order_ptr + row, mask=there, other=0) // TOP
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < inner
        gate_at = 2 * column if PAIRED else column
        up_at = gate_at + (1 if PAIRED else inner)
        base = weight_ptr + expert.to(tl.int64) * by_expert
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, hidden, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            known = depth < hidden
            x = tl.load(
                x_ptr + token[:, None] * x_stride + depth[None, :], mask=there[:, None] & known[None, :], other=0.0
            )
            seen = known[:, None] & inside[None, :]
            at = base + depth[:, None] * by_input
            gate = tl.dot(
                x, tl.load(at + gate_at[None, :] * by_output, mask=seen, other=0.0), gate, input_precision=PRECISION
            )
            up = tl.dot(
                x, tl.load(at + up_at[None, :] * by_output, mask=seen, other=0.0), up, input_precision=PRECISION
            )
        if PAIRED:
            biases = bias_ptr + expert * 2 * inner
            gate += tl.load(biases + gate_at, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(biases + up_at, mask=inside, other=0.0).to(tl.float32)[None, :]
        kind = out_ptr.dtype.element_ty
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)  # as two products would give them
        if PAIRED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        inner_state = gate * tl.sigmoid(gate * alpha) * up
        tl.store(
            out_ptr + row[:, None] * inner + column[None, :],
            inner_state.to(kind),
            mask=there[:, None] & inside[None, :],
        )


@triton.jit
def _product_kernel(
    x_ptr, weight_ptr, bias_ptr, factor_ptr, out_ptr, order_ptr, expert_ptr, start_ptr, end_ptr, inputs, outputs,
    by_expert, by_output, by_input,
    BIAS: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of sorted rows times their expert's matrix; BACK multiplies by a factor of the row's pair, and writes at
    the pair's place.
    """
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        row = tl.load(start_ptr + tile) + tl.arange(0, ROWS)
        there = row < tl.load(end_ptr + tile)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < outputs
        base = weight_ptr + expert.to(tl.int64) * by_expert
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, inputs, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            known = depth < inputs
            x = tl.load(x_ptr + row[:, None] * inputs + depth[None, :], mask=there[:, None] & known[None, :], other=0.0)
            at = base + depth[:, None] * by_input + column[None, :] * by_output
            weight = tl.load(at, mask=known[:, None] & inside[None, :], other=0.0)
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(bias_ptr + expert * outputs + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        place = row
        if BACK:
            place = tl.load(order_ptr + row, mask=there, other=0)
            total *= tl.load(factor_ptr + place, mask=there, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out_ptr + place[:, None] * outputs + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=there[:, None] & inside[None, :],
        )


@triton.jit
def _outer_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    bounds_ptr,
    outputs,
    inputs,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of one expert's gradient: the sum over its rows of grad ⊗ x."""
    expert = tl.program_id(0)
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    output = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    entry = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < end)[:, None]
        grad = tl.load(
            grad_ptr + row[:, None] * outputs + output[None, :], mask=there & (output < outputs)[None, :], other=0.0
        )
        x = tl.load(x_ptr + row[:, None] * inputs + entry[None, :], mask=there & (entry < inputs)[None, :], other=0.0)
        total = tl.dot(tl.trans(grad), x, total, input_precision=PRECISION)
    at = out_ptr + expert.to(tl.int64) * outputs * inputs + output[:, None] * inputs + entry[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(output < outputs)[:, None] & (entry < inputs)[None, :])


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def product(
    x_RX: Tensor, weight_EOX: Tensor, rows: Sorted, bias_EO: Tensor | None = None, factor_R: Tensor | None = None
) -> Tensor:
    """Return sorted rows times the matrix of their expert [R, O]; with a factor of each pair, at the place of the pair."""
    out_RO = x_RX.new_empty(len(x_RX), weight_EOX.shape[1])
    x_RX = x_RX.contiguous()
    _product_kernel[(len(rows.expert_P), triton.cdiv(out_RO.shape[1], COLUMNS))](
        x_RX, weight_EOX, x_RX if bias_EO is None else bias_EO, x_RX if factor_R is None else factor_R, out_RO,
        rows.order_R, rows.expert_P, rows.start_P, rows.end_P, x_RX.shape[1], out_RO.shape[1], *weight_EOX.stride(),
        bias_EO is not None, factor_R is not None, ROWS, COLUMNS, DEPTH, _precision(x_RX),
    )  # fmt: skip
    return out_RO


class GroupedProduct(torch.autograd.Function):
    """`product` without bias and factor, with gradients of rows and weights."""

    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, weight_EOX: Tensor, rows: Sorted) -> Tensor:
        ctx.save_for_backward(x_RX, weight_EOX)
        ctx.rows = rows
        return product(x_RX, weight_EOX, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RX, weight_EOX = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_x = product(grad_RO, weight_EOX.transpose(1, 2), ctx.rows) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            experts, outputs, inputs = weight_EOX.shape
            grad_weight = weight_EOX.new_empty(experts, outputs, inputs)
            _outer_kernel[(experts, triton.cdiv(outputs, OUTER), triton.cdiv(inputs, OUTER))](
                grad_RO,
                x_RX.contiguous(),
                grad_weight,
                ctx.rows.bounds_E,
                outputs,
                inputs,
                OUTER,
                ROWS,
                _precision(x_RX),
            )
        return grad_x, grad_weight, None


@dataclass(frozen=True, slots=True)
class _Experts:
    """The tensors of a layer's experts: matrices [E, outputs, inputs] in any order in memory, and how they are activated."""

    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | None = None
    limit: float = 0.0
    alpha: float = 1.0

    @staticmethod
    def of(module: Any) -> _Experts | None:
        """Return those of a module of transformers; None for a form that is not known here."""
        up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not (isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.dim() == down.dim() == 3):
            return None
        if type(module).__name__ == "GptOssExperts":
            biases = module.gate_up_proj_bias, module.down_proj_bias
            return _Experts(up.transpose(1, 2), down.transpose(1, 2), biases, float(module.limit), float(module.alpha))
        silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        known = silu and up.shape[1] == 2 * down.shape[2] and not hasattr(module, "gate_up_proj_bias")
        return _Experts(up, down) if known else None

    def decode(self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        rows, inner = sort_rows(index_TK, len(self.gate_up)), self.down.shape[2]
        x_TH, mid_RI = x_TH.contiguous(), x_TH.new_empty(index_TK.numel(), inner)
        biases = self.biases or (x_TH, None)
        _gate_up_kernel[(len(rows.expert_P), triton.cdiv(inner, COLUMNS))](
            x_TH, self.gate_up, biases[0], mid_RI, rows.order_R, rows.expert_P, rows.start_P, rows.end_P, x_TH.shape[1],
            inner, x_TH.stride(0), *self.gate_up.stride(), self.limit, self.alpha, rows.top, self.biases is not None, ROWS,
            COLUMNS, DEPTH, _precision(x_TH),
        )  # fmt: skip
        out_RH = product(mid_RI, self.down, rows, biases[1], weight_TK.reshape(-1).contiguous())
        return out_RH.view(*index_TK.shape, out_RH.shape[1]).sum(1)

    def train(self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        rows = sort_rows(index_TK, len(self.gate_up))
        grouped: Any = GroupedProduct.apply
        expert_R = index_TK.reshape(-1)[rows.order_R]
        both = grouped(x_TH[rows.order_R // rows.top], self.gate_up, rows)
        if self.biases is not None:
            both = both + self.biases[0][expert_R]
            gate, up = both[:, ::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit) + 1
        else:
            gate, up = both.chunk(2, -1)
        out = grouped(gate * torch.sigmoid(gate * self.alpha) * up, self.down, rows)
        out = out if self.biases is None else out + self.biases[1][expert_R]
        out = out * weight_TK.reshape(-1)[rows.order_R, None].to(out.dtype)
        places = torch.empty_like(rows.order_R)
        places[rows.order_R] = torch.arange(len(places), device=places.device)
        summed: Tensor = out[places].view(*index_TK.shape, out.shape[1]).sum(1)
        return summed


class _Forward:
    """Replacement of an experts module's forward. It is a class so that a copy of the model copies it, too."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = _Experts.of(self.module)
        assert experts is not None
        run = experts.train if torch.is_grad_enabled() else experts.decode
        return run(hidden_states, top_k_index, top_k_weights)


def use_expert_kernels(model: nn.Module) -> int:
    """Run the experts of a model by these kernels from now on; returns the number of layers. Nothing calls this by default."""
    found = [module for module in model.modules() if _Experts.of(module) is not None]
    for module in found:
        replaced: Any = module
        replaced.forward = _Forward(module)
    return len(found)
