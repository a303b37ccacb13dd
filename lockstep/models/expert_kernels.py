"""Triton kernels that multiply by the experts of a mixture: rows are sorted by expert, and only experts that have rows are read.

Sums run over the inputs from first to last, whatever the number of rows. Nothing waits for the host, so everything can be
captured in a CUDA graph.

Legend: T tokens, K experts of each, R = T · K rows, E experts, H hidden, I inner width, O outputs, X inputs.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.device import shared_memory
from lockstep.models.activation_kernels import Activation, activated
from lockstep.models.mxfp4 import Packed
from lockstep.models.mxfp4_kernels import packed_gate_up, packed_product
from lockstep.models.ordered_product_kernel import Tile
from lockstep.models.overlap import await_input, overlap
from lockstep.models.route_kernels import Sorted, block_of, blocks


def gate_up_tile(each: float) -> Tile:
    """Return a fast tile of `gate_up` for this many rows of an expert, on average. It does not change a bit."""
    if each <= 8:
        return Tile(16, 64, 128, 4, 4)
    if each <= 24:
        return Tile(32, 64, 128, 4, 3)
    if each <= 40:
        return Tile(64, 64, 64, 4, 3)
    return Tile(128, 128, 64, 8, 4) if each <= 128 else Tile(128, 64, 64, 8, 3)


def product_tile(each: float) -> Tile:
    """Return a fast tile of `product`."""
    if each <= 8:
        return Tile(16, 128, 128, 4, 4)
    if each <= 24:
        return Tile(32, 128, 128, 4, 3)
    if each <= 40:
        return Tile(64, 128, 64, 8, 4)
    return Tile(128, 256, 64, 8, 4) if each <= 128 else Tile(128, 128, 64, 8, 3)


def _half(rows: int) -> int:
    """Return the rows of a block that has few; tensor cores take 64 at a time."""
    return 64 if rows == 128 else rows


@cache
def _fitted(tile: Tile, columns: int, number: int, device: torch.device) -> Tile:
    """Return the tile with as many stages as fit into shared memory, for `columns` of weights and numbers of this many bytes."""
    stage = (tile.rows + columns) * tile.depth * number
    return replace(tile, stages=max(1, min(tile.stages, 1 + shared_memory(device) // stage)))


@triton.jit
def _gate_up_rows(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, expert, first, end, hidden, inner, x_stride, by_output, by_input, limit,
    alpha, TOP: tl.constexpr, PAIRED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    kind = out_ptr.dtype.element_ty
    paired = tl.program_id(0) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)
    both = paired % (2 * inner) if PAIRED else column % inner
    row = first + tl.arange(0, ROWS)
    there = (row < end)[:, None]
    token = tl.load(order_ptr + row, mask=row < end, other=0) // TOP
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_at = weight_ptr + depth[:, None] * by_input + both[None, :] * by_output
    if PAIRED:
        total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    else:
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, tl.cdiv(hidden, DEPTH)):
        if EVEN:
            x, weight = tl.load(x_at, mask=there, other=0.0), tl.load(weight_at)
        else:
            left = depth < hidden - step * DEPTH
            x = tl.load(x_at, mask=there & left[None, :], other=0.0)
            weight = tl.load(weight_at, mask=left[:, None], other=0.0)
        if PAIRED:
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        else:
            gate = tl.dot(x, weight, gate, input_precision=PRECISION)
            if EVEN:
                weight = tl.load(weight_at + inner * by_output)
            else:
                weight = tl.load(weight_at + inner * by_output, mask=left[:, None], other=0.0)
            up = tl.dot(x, weight, up, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH * by_input
    if PAIRED:
        total = total.to(kind).to(tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + expert * 2 * inner + both).to(tl.float32)
            total = (total + bias[None, :]).to(kind).to(tl.float32)
        gate, up = tl.split(tl.reshape(total, [ROWS, COLUMNS, 2]))
    else:
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    state = activated(gate, up, PAIRED, limit, alpha)
    mask = there & (column < inner)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * inner + column[None, :], state.to(kind), mask=mask)


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, bounds_ptr, hidden, inner, x_stride, by_expert, by_output, by_input,
    limit, alpha, experts, TOP: tl.constexpr, PAIRED: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the inner states of one block of an expert's rows; of HALF a block if it has no more."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    weight_ptr += expert.to(tl.int64) * by_expert
    if HALF < ROWS and end - first <= HALF:
        _gate_up_rows(
            x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, expert, first, end, hidden, inner, x_stride, by_output, by_input,
            limit, alpha, TOP, PAIRED, BIAS, EVEN, HALF, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip
    else:
        _gate_up_rows(
            x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, expert, first, end, hidden, inner, x_stride, by_output, by_input,
            limit, alpha, TOP, PAIRED, BIAS, EVEN, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip


@triton.jit
def _product_rows(
    x_ptr, weight_ptr, out_ptr, first, end, inputs, outputs, by_output, by_input,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row = first + tl.arange(0, ROWS)
    there = (row < end)[:, None]
    x_at = x_ptr + row.to(tl.int64)[:, None] * inputs + depth[None, :]
    weight_at = weight_ptr + depth[:, None] * by_input + (column % outputs)[None, :] * by_output
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, tl.cdiv(inputs, DEPTH)):
        if EVEN:
            x, weight = tl.load(x_at, mask=there, other=0.0), tl.load(weight_at)
        else:
            left = depth < inputs - step * DEPTH
            x = tl.load(x_at, mask=there & left[None, :], other=0.0)
            weight = tl.load(weight_at, mask=left[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH * by_input
    mask = there & (column < outputs)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _product_kernel(
    x_ptr, weight_ptr, out_ptr, bounds_ptr, inputs, outputs, by_expert, by_output, by_input, experts, EXPERTS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one block of an expert's rows times its matrix; of HALF a block if it has no more."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    weight_ptr += expert.to(tl.int64) * by_expert
    if HALF < ROWS and end - first <= HALF:
        _product_rows(
            x_ptr, weight_ptr, out_ptr, first, end, inputs, outputs, by_output, by_input, EVEN, HALF, COLUMNS, DEPTH,
            PRECISION,
        )  # fmt: skip
    else:
        _product_rows(
            x_ptr, weight_ptr, out_ptr, first, end, inputs, outputs, by_output, by_input, EVEN, ROWS, COLUMNS, DEPTH,
            PRECISION,
        )  # fmt: skip


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def gate_up(
    x_TH: Tensor, weight_EOX: Tensor | Packed, bias_EO: Tensor | None, rows: Sorted, activation: Activation
) -> Tensor:
    """Return the inner states [R, I] of sorted rows: product with gate and up, bias, and activation."""
    if isinstance(weight_EOX, Packed):
        assert bias_EO is not None
        return packed_gate_up(x_TH, weight_EOX, bias_EO, rows, activation.limit, activation.alpha, _precision(x_TH))
    x_TH, inner, tile = x_TH.contiguous(), weight_EOX.shape[1] // 2, gate_up_tile(rows.each)
    tile = _fitted(tile, 2 * tile.columns, x_TH.element_size(), x_TH.device)
    out_RI = x_TH.new_empty(len(rows.order_R), inner)
    _gate_up_kernel[(triton.cdiv(inner, tile.columns), blocks(rows, tile.rows))](
        x_TH, weight_EOX, x_TH if bias_EO is None else bias_EO, out_RI, rows.order_R, rows.bounds_E, x_TH.shape[1], inner,
        x_TH.stride(0), *weight_EOX.stride(), activation.limit, activation.alpha, rows.experts, rows.top, activation.paired,
        bias_EO is not None, triton.next_power_of_2(rows.experts), x_TH.shape[1] % tile.depth == 0, tile.rows,
        _half(tile.rows), tile.columns, tile.depth, _precision(x_TH),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_RI


def product(x_RX: Tensor, weight_EOX: Tensor | Packed, rows: Sorted) -> Tensor:
    """Return sorted rows times the matrix of their expert, [R, O]."""
    if isinstance(weight_EOX, Packed):
        return packed_product(x_RX, weight_EOX, rows, _precision(x_RX))
    x_RX, outputs, tile = x_RX.contiguous(), weight_EOX.shape[1], product_tile(rows.each)
    tile = _fitted(tile, tile.columns, x_RX.element_size(), x_RX.device)
    out_RO = x_RX.new_empty(len(x_RX), outputs)
    _product_kernel[(triton.cdiv(outputs, tile.columns), blocks(rows, tile.rows))](
        x_RX, weight_EOX, out_RO, rows.bounds_E, x_RX.shape[1], outputs, *weight_EOX.stride(), rows.experts,
        triton.next_power_of_2(rows.experts), x_RX.shape[1] % tile.depth == 0, tile.rows,
        _half(tile.rows), tile.columns, tile.depth, _precision(x_RX),
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
