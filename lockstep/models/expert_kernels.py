"""Triton kernels that multiply by the experts of a mixture: rows are sorted by expert, and only experts that have rows are read.

Sums run over the inputs from first to last, whatever the number of rows. Nothing waits for the host, so everything can be
captured in a CUDA graph.

An adapter's product is rounded by itself and then added, as where both are operations of their own.

Legend: T tokens, K experts of each, R = T · K rows, E experts, H hidden, I inner width, O outputs, X inputs, L rank of adapters.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.device import shared_memory, since_hopper
from lockstep.models.activation_kernels import Activation, activated, add_low_rank
from lockstep.models.mxfp4 import Packed
from lockstep.models.mxfp4_kernels import Low, packed_gate_up, packed_product
from lockstep.models.ordered_product_kernel import Tile
from lockstep.models.overlap import await_input, overlap
from lockstep.models.route_kernels import Sorted, block_of, blocks

KEPT = 16 * 2**20
"""Most bytes of a result that stays in the L2 cache, of which an H200 has 50 MiB, until the next kernel reads it."""


@dataclass(frozen=True, slots=True)
class ExpertTile(Tile):
    """Tile of a block of an expert's rows."""

    side: bool = False
    """Weights as the left operand, of which Hopper's tensor cores take 64 rows at a time, filled or not; of the right one they
    take 8. Fewer products with nothing take less power, which limits how fast an H200 decodes.
    """

    @property
    def half(self) -> int:
        """Rows that a block computes if it has no more."""
        return self.rows // 2 if self.side or self.rows == 128 else self.rows


def gate_up_tile(each: float) -> ExpertTile:
    """Return a fast tile of `gate_up` for this many rows of an expert, on average. It does not change a bit."""
    if each <= 8:
        return ExpertTile(16, 64, 128, 4, 4)
    if each <= 24:
        return ExpertTile(32, 64, 128, 4, 3)
    if each <= 40:
        return ExpertTile(64, 64, 64, 4, 3, side=True)
    return ExpertTile(128, 128, 64, 8, 4) if each <= 128 else ExpertTile(128, 64, 64, 8, 3)


def adapted_rows(each: float) -> float:
    """Return the number of rows whose tile of `gate_up` is fast with an adapter: the largest tile has no room for its product."""
    return min(each, 40) if each <= 128 else each


def product_tile(each: float) -> ExpertTile:
    """Return a fast tile of `product`."""
    if each <= 8:
        return ExpertTile(16, 128, 128, 4, 4)
    if each <= 24:
        return ExpertTile(32, 128, 128, 4, 3)
    if each <= 40:
        return ExpertTile(64, 128, 64, 4, 4, side=True)
    return ExpertTile(128, 256, 64, 8, 4) if each <= 128 else ExpertTile(128, 128, 64, 8, 3)


@cache
def _fitted(tile: ExpertTile, columns: int, number: int, device: torch.device) -> ExpertTile:
    """Return the tile with as many stages as fit into shared memory, for `columns` of weights and numbers of this many bytes."""
    stage = (tile.rows + columns) * tile.depth * number
    return replace(tile, stages=max(1, min(tile.stages, 1 + shared_memory(device) // stage)))


@triton.jit
def _weights(
    source, at, expert, first, start, output, inside, BOXED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load a tile of weights, [DEPTH, COLUMNS]: from the input `start` and the output `first` on.

    `output` and `inside` say which outputs and inputs are there: all outputs if WHOLE, all inputs if EVEN.
    """
    if BOXED:
        return source.load([expert, first, start]).reshape(COLUMNS, DEPTH).T
    elif EVEN and WHOLE:
        return tl.load(at)
    elif EVEN:
        return tl.load(at, mask=output[None, :], other=0.0)
    else:
        return tl.load(at, mask=output[None, :] & inside[:, None], other=0.0)


@triton.jit
def _add_product(total, x, weights, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Add the product of rows [ROWS, DEPTH] and weights [DEPTH, COLUMNS]; with the weights as the left operand if SIDE."""
    if SIDE:
        return tl.dot(weights.T, x.T, total, input_precision=PRECISION)
    else:
        return tl.dot(x, weights, total, input_precision=PRECISION)


@triton.jit
def _gate_up_rows(
    x_ptr, weight, bias_ptr, out_ptr, order_ptr, expert, first, end, hidden, inner, x_stride, by_expert, by_output, by_input,
    limit, alpha, low_ptr, up_ptr, rank, up_expert, up_output, up_rank, ROWS: tl.constexpr, SIDE: tl.constexpr,
    TOP: tl.constexpr, PAIRED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    BOXED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 2 * COLUMNS if PAIRED else COLUMNS
    start = tl.program_id(0) * COLUMNS
    column, depth = start + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    both = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    output = both < (2 * inner if PAIRED else inner)
    row = first + tl.arange(0, ROWS)
    there = (row < end)[:, None]
    token = tl.load(order_ptr + row, mask=row < end, other=0) // TOP
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_at = weight
    if not BOXED:
        weight_at = weight + expert.to(tl.int64) * by_expert + depth[:, None] * by_input + both[None, :] * by_output
    gate = tl.zeros([WIDE, ROWS] if SIDE else [ROWS, WIDE], tl.float32)
    up = tl.zeros([WIDE, ROWS] if SIDE else [ROWS, WIDE], tl.float32)
    for step in range(0, tl.cdiv(hidden, DEPTH)):
        inside = depth < hidden - step * DEPTH
        x = tl.load(x_at, mask=there if EVEN else there & inside[None, :], other=0.0)
        weights = _weights(
            weight, weight_at, expert, start, step * DEPTH, output, inside, BOXED, EVEN, WHOLE, WIDE, DEPTH
        )
        gate = _add_product(gate, x, weights, SIDE, PRECISION)
        if not PAIRED:
            up_at = weight if BOXED else weight_at + inner * by_output
            weights = _weights(
                weight, up_at, expert, inner + start, step * DEPTH, output, inside, BOXED, EVEN, WHOLE, WIDE, DEPTH
            )
            up = _add_product(up, x, weights, SIDE, PRECISION)
        x_at += DEPTH
        if not BOXED:
            weight_at += DEPTH * by_input
    kind = out_ptr.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    if RANK:
        given = low_ptr, up_ptr, row, there
        sizes = expert, rank, up_expert, up_output, up_rank
        gate = add_low_rank(gate, kind, *given, both, output, *sizes, RANK, SIDE, PRECISION)
        if not PAIRED:
            up = add_low_rank(up, kind, *given, inner + both, output, *sizes, RANK, SIDE, PRECISION)
    if SIDE:
        gate, up = gate.T, up.T
    if PAIRED:
        if BIAS:
            bias = tl.load(bias_ptr + expert * 2 * inner + both, mask=output, other=0.0).to(tl.float32)
            gate = (gate + bias[None, :]).to(kind).to(tl.float32)
        gate, up = tl.split(tl.reshape(gate, [ROWS, COLUMNS, 2]))
    state = activated(gate, up, PAIRED, limit, alpha)
    mask = there & (column < inner)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * inner + column[None, :], state.to(kind), mask=mask, eviction_policy=POLICY
    )


@triton.jit
def _gate_up_kernel(
    x_ptr, weight, bias_ptr, out_ptr, order_ptr, bounds_ptr, hidden, inner, x_stride, by_expert, by_output, by_input, limit,
    alpha, experts, low_ptr, up_ptr, rank, up_expert, up_output, up_rank, TOP: tl.constexpr, PAIRED: tl.constexpr,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, BOXED: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RANK: tl.constexpr, PRECISION: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the inner states of one block of an expert's rows."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    given = (
        x_ptr, weight, bias_ptr, out_ptr, order_ptr, expert, first, end, hidden, inner, x_stride, by_expert, by_output,
        by_input, limit, alpha, low_ptr, up_ptr, rank, up_expert, up_output, up_rank,
    )  # fmt: skip
    if HALF < ROWS and end - first <= HALF:
        _gate_up_rows(
            *given, HALF, SIDE, TOP, PAIRED, BIAS, EVEN, WHOLE, BOXED, COLUMNS, DEPTH, RANK, PRECISION, POLICY
        )
    else:
        _gate_up_rows(
            *given, ROWS, SIDE, TOP, PAIRED, BIAS, EVEN, WHOLE, BOXED, COLUMNS, DEPTH, RANK, PRECISION, POLICY
        )


@triton.jit
def _product_rows(
    x_ptr, weight, out_ptr, order_ptr, expert, first, end, inputs, outputs, by_expert, by_output, by_input, scaling, low_ptr,
    up_ptr, rank, up_expert, up_output, up_rank, ROWS: tl.constexpr, SIDE: tl.constexpr, TOP: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, BOXED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SCALED: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * COLUMNS
    column, depth = start + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    row = first + tl.arange(0, ROWS)
    there, output = (row < end)[:, None], column < outputs
    source = tl.load(order_ptr + row, mask=row < end, other=0) // TOP if TOP else row
    x_at = x_ptr + source.to(tl.int64)[:, None] * inputs + depth[None, :]
    weight_at = weight
    if not BOXED:
        weight_at = weight + expert.to(tl.int64) * by_expert + depth[:, None] * by_input + column[None, :] * by_output
    total = tl.zeros([COLUMNS, ROWS] if SIDE else [ROWS, COLUMNS], tl.float32)
    for step in range(0, tl.cdiv(inputs, DEPTH)):
        inside = depth < inputs - step * DEPTH
        x = tl.load(x_at, mask=there if EVEN else there & inside[None, :], other=0.0)
        weights = _weights(
            weight, weight_at, expert, start, step * DEPTH, output, inside, BOXED, EVEN, WHOLE, COLUMNS, DEPTH
        )
        total = _add_product(total, x, weights, SIDE, PRECISION)
        x_at += DEPTH
        if not BOXED:
            weight_at += DEPTH * by_input
    mask = there & output[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :]
    kind = out_ptr.dtype.element_ty
    if SCALED:
        total = total.to(kind).to(tl.float32) * scaling
    if RANK:
        total = add_low_rank(
            total, kind, low_ptr, up_ptr, row, there, column, output, expert, rank, up_expert, up_output, up_rank, RANK, SIDE,
            PRECISION,
        )  # fmt: skip
    out = total.to(kind)
    tl.store(place, out.T if SIDE else out, mask=mask, eviction_policy=POLICY)


@triton.jit
def _product_kernel(
    x_ptr, weight, out_ptr, order_ptr, bounds_ptr, inputs, outputs, by_expert, by_output, by_input, experts, scaling, low_ptr,
    up_ptr, rank, up_expert, up_output, up_rank, TOP: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr, BOXED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one block of an expert's rows times its matrix. With TOP the rows are those of their tokens."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    given = (
        x_ptr, weight, out_ptr, order_ptr, expert, first, end, inputs, outputs, by_expert, by_output, by_input, scaling,
        low_ptr, up_ptr, rank, up_expert, up_output, up_rank,
    )  # fmt: skip
    if HALF < ROWS and end - first <= HALF:
        _product_rows(*given, HALF, SIDE, TOP, EVEN, WHOLE, BOXED, COLUMNS, DEPTH, SCALED, RANK, PRECISION, POLICY)
    else:
        _product_rows(*given, ROWS, SIDE, TOP, EVEN, WHOLE, BOXED, COLUMNS, DEPTH, SCALED, RANK, PRECISION, POLICY)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _policy(result: Tensor) -> str:
    """Return the eviction policy of the stores of a result: weights of experts would push a small one out of the L2 cache."""
    small = result.numel() * result.element_size() <= KEPT
    return "evict_last" if small and result.is_cuda and since_hopper() else ""


def _boxes(weight_EOX: Tensor, tile: ExpertTile) -> TensorDescriptor | None:
    """Return how the GPU's copy engine reads tiles of weights; None where it cannot (before Hopper, or outputs before inputs).

    It takes less power than copies by threads. Tiles whose rows are the left operand were no faster with it.
    """
    size, number = weight_EOX.shape[2], weight_EOX.element_size()
    aligned = weight_EOX.is_contiguous() and weight_EOX.data_ptr() % 16 == size * number % 16 == 0
    if not (tile.side and number == 2 and aligned and since_hopper()):
        return None
    return TensorDescriptor.from_tensor(weight_EOX, [1, tile.columns, tile.depth])


def gate_up(
    x_TH: Tensor, weight_EOX: Tensor | Packed, bias_EO: Tensor | None, rows: Sorted, activation: Activation,
    low: Low | None = None,
) -> Tensor:  # fmt: skip
    """Return the inner states [R, I] of sorted rows: product with gate and up and that of an adapter, bias, and activation."""
    if isinstance(weight_EOX, Packed):
        assert bias_EO is not None
        return packed_gate_up(
            x_TH, weight_EOX, bias_EO, rows, activation.limit, activation.alpha, low, _precision(x_TH)
        )
    x_TH, inner = x_TH.contiguous(), weight_EOX.shape[1] // 2
    tile = gate_up_tile(rows.each if low is None else adapted_rows(rows.each))
    tile = _fitted(tile, 2 * tile.columns, x_TH.element_size(), x_TH.device)
    boxes = None if activation.paired else _boxes(weight_EOX, tile)
    out_RI = x_TH.new_empty(len(rows.order_R), inner)
    _gate_up_kernel[(triton.cdiv(inner, tile.columns), blocks(rows, tile.rows))](
        x_TH, boxes or weight_EOX, x_TH if bias_EO is None else bias_EO, out_RI, rows.order_R, rows.bounds_E, x_TH.shape[1],
        inner, x_TH.stride(0), *weight_EOX.stride(), activation.limit, activation.alpha, rows.experts,
        *Low.given(low, x_TH), rows.top, activation.paired, bias_EO is not None, triton.next_power_of_2(rows.experts),
        x_TH.shape[1] % tile.depth == 0, inner % tile.columns == 0, boxes is not None, tile.rows, tile.half, tile.side,
        tile.columns, tile.depth, Low.width(low), _precision(x_TH), _policy(out_RI),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_RI


def product(x_RX: Tensor, weight_EOX: Tensor | Packed, rows: Sorted, low: Low | None = None) -> Tensor:
    """Return sorted rows times the matrix of their expert, [R, O], with the product of an adapter added."""
    if isinstance(weight_EOX, Packed):
        return packed_product(x_RX, weight_EOX, rows, low, _precision(x_RX))
    return _product(x_RX, weight_EOX, rows, product_tile(rows.each), low)


def low_rank_rows(x: Tensor, down_ELX: Tensor, rows: Sorted, scaling: float, *, tokens: bool) -> Tensor:
    """Return scaling · x A of sorted rows, [R, L]; with `tokens` x has a row for each token instead."""
    columns = min(128, max(16, triton.next_power_of_2(down_ELX.shape[1])))
    tile = replace(product_tile(rows.each), columns=columns, depth=128, side=False, warps=4, stages=4)
    return _product(x, down_ELX, rows, replace(tile, rows=min(64, tile.rows)), None, scaling, rows.top if tokens else 0)


def _product(
    x: Tensor, weight_EOX: Tensor, rows: Sorted, tile: ExpertTile, low: Low | None, scaling: float = 1.0, top: int = 0
) -> Tensor:
    x, outputs, count = x.contiguous(), weight_EOX.shape[1], len(rows.order_R)
    tile = _fitted(tile, tile.columns, x.element_size(), x.device)
    boxes = _boxes(weight_EOX, tile)
    out_RO = x.new_empty(count, outputs)
    _product_kernel[(triton.cdiv(outputs, tile.columns), blocks(rows, tile.rows))](
        x, boxes or weight_EOX, out_RO, rows.order_R, rows.bounds_E, x.shape[1], outputs, *weight_EOX.stride(), rows.experts,
        scaling, *Low.given(low, x), top, triton.next_power_of_2(rows.experts), x.shape[1] % tile.depth == 0,
        outputs % tile.columns == 0, boxes is not None, tile.rows, tile.half, tile.side, tile.columns, tile.depth,
        scaling != 1.0, Low.width(low), _precision(x), _policy(out_RO),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_RO


@triton.jit
def _outer_kernel(
    grad_ptr, x_ptr, out_ptr, bounds_ptr, outputs, inputs, SIZE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Compute one tile of one expert's gradient: the sum over its rows of grad ⊗ x."""
    expert = tl.program_id(0)
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    output = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    entry = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for first in range(start, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        there = (row < end)[:, None]
        grad = tl.load(
            grad_ptr + row[:, None] * outputs + output[None, :], mask=there & (output < outputs)[None, :], other=0.0
        )
        x = tl.load(x_ptr + row[:, None] * inputs + entry[None, :], mask=there & (entry < inputs)[None, :], other=0.0)
        total = tl.dot(tl.trans(grad), x, total, input_precision=PRECISION)
    at = out_ptr + expert.to(tl.int64) * outputs * inputs + output[:, None] * inputs + entry[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(output < outputs)[:, None] & (entry < inputs)[None, :])


def outer(grad_RO: Tensor, x_RX: Tensor, rows: Sorted) -> Tensor:
    """Return the gradient of each expert's matrix, [E, O, X]."""
    outputs, inputs = grad_RO.shape[1], x_RX.shape[1]
    out_EOX = x_RX.new_empty(rows.experts, outputs, inputs)
    grid = (rows.experts, triton.cdiv(outputs, 64), triton.cdiv(inputs, 64))
    given = grad_RO.contiguous(), x_RX.contiguous(), out_EOX, rows.bounds_E
    _outer_kernel[grid](*given, outputs, inputs, 64, 32, _precision(x_RX), enable_fp_fusion=False)
    return out_EOX
