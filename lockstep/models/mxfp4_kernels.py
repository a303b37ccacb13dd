"""Triton kernels that multiply by experts' matrices in MXFP4: they dequantise a tile at a time, or the whole matrix.

The multiplication is transposed, so that the dequantised tile goes to the tensor cores from registers. Sums run over the inputs
from first to last, as in expert_kernels: the results are those of a dense copy, to the bit.

Legend: T tokens, K experts of each, R = T · K rows, E experts, H hidden, I inner width, O outputs, X inputs, G = X / 32.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.mxfp4 import Packed
from lockstep.models.ordered_product_kernel import Tile
from lockstep.models.route_kernels import Sorted, activated

GROUPS = 128
"""Blocks of 32 numbers that one program dequantises."""


@triton.jit
def _numbers(byte, scale):
    """Return the two numbers of each byte, the earlier one first, in fp32.

    The three low bits of a code are exponent and mantissa: as those of fp16 they make 2^-14 times its magnitude.
    """
    byte = byte.to(tl.uint16)
    low = (((byte & 7) << 9) | ((byte & 8) << 12)).to(tl.float16, bitcast=True)
    high = (((byte & 0x70) << 5) | ((byte & 0x80) << 8)).to(tl.float16, bitcast=True)
    power = ((scale.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)  # 2^(scale - 127 + 14)
    return low.to(tl.float32) * power, high.to(tl.float32) * power


@triton.jit
def _matrix(block_ptr, scale_ptr, row, groups, first, kind: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Load DEPTH inputs from `first` on of the given rows of a matrix, [ROWS, DEPTH]; beyond its inputs they are 0."""
    part: tl.constexpr = DEPTH // 32
    half = tl.arange(0, DEPTH // 2)
    group = first // 32 + tl.arange(0, part)
    start = row.to(tl.int64)[:, None] * groups
    byte = tl.load(
        block_ptr + start * 16 + (first // 2 + half)[None, :], mask=(half < groups * 16 - first // 2)[None, :], other=0
    )
    scale = tl.load(scale_ptr + start + group[None, :], mask=(group < groups)[None, :], other=0)
    wide = tl.reshape(tl.broadcast_to(scale[:, :, None], [ROWS, part, 16]), [ROWS, DEPTH // 2])
    low, high = _numbers(byte, wide)
    return tl.reshape(tl.join(low.to(kind), high.to(kind)), [ROWS, DEPTH])


@triton.jit
def _gate_up_kernel(
    x_ptr, block_ptr, scale_ptr, bias_ptr, out_ptr, order_ptr, bounds_ptr, hidden, inner, x_stride, limit, alpha,
    TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the inner states of one expert's rows, in sorted order; gates and ups alternate."""
    expert = tl.program_id(1)
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    both = (tl.program_id(0) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)) % (2 * inner)
    depth = tl.arange(0, DEPTH)
    kind = out_ptr.dtype.element_ty
    groups = hidden // 32
    bias = tl.load(bias_ptr + expert * 2 * inner + both).to(tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        token = tl.load(order_ptr + row, mask=row < end, other=0) // TOP
        x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
        total = tl.zeros([2 * COLUMNS, ROWS], tl.float32)
        for step in range(0, tl.cdiv(hidden, DEPTH)):
            x = tl.load(x_at + step * DEPTH, mask=(depth < hidden - step * DEPTH)[None, :], other=0.0)
            weight = _matrix(
                block_ptr, scale_ptr, expert * 2 * inner + both, groups, step * DEPTH, kind, 2 * COLUMNS, DEPTH
            )
            total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
        total = tl.trans(total).to(kind).to(tl.float32)
        total = (total + bias[None, :]).to(kind).to(tl.float32)
        gate, up = tl.split(tl.reshape(total, [ROWS, COLUMNS, 2]))
        state = activated(gate, up, True, limit, alpha)
        mask = (row < end)[:, None] & (column < inner)[None, :]
        tl.store(out_ptr + row.to(tl.int64)[:, None] * inner + column[None, :], state.to(kind), mask=mask)


@triton.jit
def _product_kernel(
    x_ptr, block_ptr, scale_ptr, out_ptr, bounds_ptr, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one expert's sorted rows times its matrix."""
    expert = tl.program_id(1)
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    kind = out_ptr.dtype.element_ty
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        x_at = x_ptr + tl.minimum(row, end - 1).to(tl.int64)[:, None] * inputs + depth[None, :]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for step in range(0, tl.cdiv(inputs, DEPTH)):
            x = tl.load(x_at + step * DEPTH, mask=(depth < inputs - step * DEPTH)[None, :], other=0.0)
            weight = _matrix(
                block_ptr,
                scale_ptr,
                expert * outputs + column % outputs,
                inputs // 32,
                step * DEPTH,
                kind,
                COLUMNS,
                DEPTH,
            )
            total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
        mask = (row < end)[:, None] & (column < outputs)[None, :]
        place = out_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(place, tl.trans(total).to(kind), mask=mask)


@triton.jit
def _open_kernel(block_ptr, scale_ptr, out_ptr, count, GROUPS: tl.constexpr):
    """Dequantise some blocks of 32 numbers."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    at = tl.arange(0, 16)[None, :]
    byte = tl.load(block_ptr + group[:, None] * 16 + at, mask=inside[:, None], other=0)
    scale = tl.load(scale_ptr + group, mask=inside, other=0)
    low, high = _numbers(byte, scale[:, None])
    both = tl.reshape(tl.join(low, high), [GROUPS, 32])
    place = out_ptr + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(place, both.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def tile_of(each: float, columns: int) -> Tile:
    """Return a fast tile for this many rows of an expert, on average, and matrices `columns` outputs at a time."""
    rows = next((rows for rows in (16, 32, 64) if each <= rows / 2), 128)
    return Tile(rows, columns, 64, 4 if rows < 128 else 8, 4)


def packed_gate_up(
    x_TH: Tensor, packed: Packed, bias_EO: Tensor, rows: Sorted, limit: float, alpha: float, precision: str
) -> Tensor:
    """Return the inner states [R, I] of sorted rows: product with gate and up, bias, and the activation of gpt-oss."""
    x_TH, inner, tile = x_TH.contiguous(), packed.outputs // 2, tile_of(rows.each, 64)
    out_RI = x_TH.new_empty(len(rows.order_R), inner)
    _gate_up_kernel[(triton.cdiv(inner, tile.columns), rows.experts)](
        x_TH, packed.blocks, packed.scales, bias_EO, out_RI, rows.order_R, rows.bounds_E, x_TH.shape[1], inner,
        x_TH.stride(0), limit, alpha, rows.top, tile.rows, tile.columns, tile.depth, precision,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out_RI


def packed_product(x_RX: Tensor, packed: Packed, rows: Sorted, precision: str) -> Tensor:
    """Return sorted rows times the matrix of their expert, [R, O]."""
    x_RX, outputs, tile = x_RX.contiguous(), packed.outputs, tile_of(rows.each, 128)
    out_RO = x_RX.new_empty(len(x_RX), outputs)
    _product_kernel[(triton.cdiv(outputs, tile.columns), rows.experts)](
        x_RX, packed.blocks, packed.scales, out_RO, rows.bounds_E, x_RX.shape[1], outputs,
        tile.rows, tile.columns, tile.depth, precision,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out_RO


def opened(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Return all matrices of a layer as one tensor [E, O, X]."""
    count = packed.scales.numel()
    out_EOX = torch.empty(
        packed.experts, packed.outputs, packed.inputs, dtype=dtype, device=packed.blocks.device
    )  # fmt: skip
    _open_kernel[(triton.cdiv(count, GROUPS),)](packed.blocks, packed.scales, out_EOX, count, GROUPS)
    return out_EOX
