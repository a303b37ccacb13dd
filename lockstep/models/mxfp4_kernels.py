"""Triton kernels that multiply by experts' matrices in MXFP4: they dequantise a tile at a time, or the whole matrix.

With numerics.exact, sums run over the inputs from first to last, as in expert_kernels: the results are those of a dense copy, to
the bit.

Legend: T tokens, K experts of each, R = T · K rows, E experts, H hidden, I inner width, O outputs, X inputs, G = X / 32, L rank
of adapters.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.device import since_hopper
from lockstep.models import exact
from lockstep.models.activation_kernels import activated, add_low_rank
from lockstep.models.mxfp4 import Packed
from lockstep.models.ordered_product_kernel import Tile
from lockstep.models.overlap import await_input, overlap
from lockstep.models.route_kernels import Sorted, block_of, blocks

GROUPS = 128
"""Blocks of 32 numbers that one program dequantises."""
_PAIR = """
shl.b32 sign, {bytes}, {sign};
and.b32 sign, sign, 0x80008000;
shl.b32 rest, {bytes}, {rest};
lop3.b32 sign, rest, 0x01C001C0, sign, 0xEA;
mul.rn.bf16x2 {out}, sign, {power};
"""
_PAIRS = (
    ("$0", "low", 12, 6, "$5"),
    ("$1", "high", 12, 6, "$6"),
    ("$2", "low", 8, 2, "$5"),
    ("$3", "high", 8, 2, "$6"),
)
FOUR_BYTES: tl.constexpr = tl.constexpr(
    "{\n.reg .b32 low, high, sign, rest;\nprmt.b32 low, $4, 0, 0x4140;\nprmt.b32 high, $4, 0, 0x4342;"
    + "".join(_PAIR.format(out=out, bytes=two, sign=a, rest=b, power=power) for out, two, a, b, power in _PAIRS)
    + "}"
)
"""Dequantises four bytes, $4, in packed bf16: $0 and $1 are the numbers in their low four bits, $2 and $3 those in the high ones.

A code's exponent and mantissa become the lowest bits of a bf16 number's exponent and the highest of its mantissa, which makes
2^-126 times its magnitude, denormal or not; $5 and $6 hold 2^126 times the scales.
"""


@triton.jit
def _numbers(byte, power):
    """Return the two numbers of each byte, the earlier one first, in fp32; `power` is 2^14 times their scale.

    The three low bits of a code are exponent and mantissa: as those of fp16 they make 2^-14 times its magnitude.
    """
    byte = byte.to(tl.uint16)
    low = (((byte & 7) << 9) | ((byte & 8) << 12)).to(tl.float16, bitcast=True)
    high = (((byte & 0x70) << 5) | ((byte & 0x80) << 8)).to(tl.float16, bitcast=True)
    return low.to(tl.float32) * power, high.to(tl.float32) * power


@triton.jit
def _power(scale):
    """Return 2^(scale - 127 + 14) in fp32."""
    return ((scale.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _matrix(byte, scale, kind: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, PACKED: tl.constexpr):
    """Dequantise a tile of a matrix, [ROWS, DEPTH]. PACKED: by FOUR_BYTES."""
    part: tl.constexpr = DEPTH // 32
    power = ((scale.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True) if PACKED else _power(scale)
    wide = tl.reshape(tl.broadcast_to(power[:, :, None], [ROWS, part, 16]), [ROWS, DEPTH // 2])
    if PACKED:
        kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        low, high = tl.inline_asm_elementwise(
            FOUR_BYTES, "=r,=r,=r,=r,r,r,r", [byte, wide], dtype=kinds, is_pure=True, pack=4
        )
    else:
        low, high = _numbers(byte, wide)
    return tl.reshape(tl.join(low.to(kind), high.to(kind)), [ROWS, DEPTH])


@triton.jit
def _gate_up_kernel(
    x_ptr, block_ptr, scale_ptr, bias_ptr, out_ptr, order_ptr, bounds_ptr, hidden, inner, x_stride, limit, alpha, experts,
    low_ptr, up_ptr, rank, up_expert, up_output, up_rank, TOP: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the inner states of one block of an expert's rows; gates and ups alternate."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    both = (tl.program_id(0) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)) % (2 * inner)
    depth, half, part = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 32)[None, :]
    kind = out_ptr.dtype.element_ty
    row = first + tl.arange(0, ROWS)
    there = (row < end)[:, None]
    token = tl.load(order_ptr + row, mask=row < end, other=0) // TOP
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
    group = (expert * 2 * inner + both).to(tl.int64)[:, None] * (hidden // 32)
    block_at = block_ptr + group * 16 + half[None, :]
    scale_at = scale_ptr + group + part
    total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    steps, scale = tl.cdiv(hidden, DEPTH), tl.load(scale_at, mask=part < hidden // 32, other=0)
    for step in range(0, steps):
        scale_at += DEPTH // 32  # scales are too narrow for asynchronous copies: load each a step before it is needed
        following = tl.load(scale_at, mask=part < hidden // 32 - (step + 1) * (DEPTH // 32), other=0)
        if EVEN:
            x, byte = tl.load(x_at, mask=there, other=0.0), tl.load(block_at)
        else:
            x = tl.load(x_at, mask=there & (depth < hidden - step * DEPTH)[None, :], other=0.0)
            byte = tl.load(block_at, mask=(half < (hidden - step * DEPTH) // 2)[None, :], other=0)
        weight = _matrix(byte, scale, kind, 2 * COLUMNS, DEPTH, PACKED)
        total = tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)
        x_at += DEPTH
        block_at += DEPTH // 2
        scale = following
    bias = tl.load(bias_ptr + expert * 2 * inner + both).to(tl.float32)
    total = total.to(kind).to(tl.float32)
    if RANK:
        total = add_low_rank(
            total, kind, low_ptr, up_ptr, row, there, both, both >= 0, expert, rank, up_expert, up_output, up_rank, RANK, False,
            PRECISION,
        )  # fmt: skip
    total = (total + bias[None, :]).to(kind).to(tl.float32)
    gate, up = tl.split(tl.reshape(total, [ROWS, COLUMNS, 2]))
    state = activated(gate, up, True, limit, alpha)
    mask = there & (column < inner)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * inner + column[None, :], state.to(kind), mask=mask)


@triton.jit
def _product_kernel(
    x_ptr, block_ptr, scale_ptr, out_ptr, bounds_ptr, inputs, outputs, experts, low_ptr, up_ptr, rank, up_expert, up_output,
    up_rank, EXPERTS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one block of an expert's rows times its matrix."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth, half, part = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 32)[None, :]
    kind = out_ptr.dtype.element_ty
    row = first + tl.arange(0, ROWS)
    there = (row < end)[:, None]
    x_at = x_ptr + row.to(tl.int64)[:, None] * inputs + depth[None, :]
    group = (expert * outputs + column % outputs).to(tl.int64)[:, None] * (inputs // 32)
    block_at = block_ptr + group * 16 + half[None, :]
    scale_at = scale_ptr + group + part
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    steps, scale = tl.cdiv(inputs, DEPTH), tl.load(scale_at, mask=part < inputs // 32, other=0)
    for step in range(0, steps):
        scale_at += DEPTH // 32
        following = tl.load(scale_at, mask=part < inputs // 32 - (step + 1) * (DEPTH // 32), other=0)
        if EVEN:
            x, byte = tl.load(x_at, mask=there, other=0.0), tl.load(block_at)
        else:
            x = tl.load(x_at, mask=there & (depth < inputs - step * DEPTH)[None, :], other=0.0)
            byte = tl.load(block_at, mask=(half < (inputs - step * DEPTH) // 2)[None, :], other=0)
        weight = _matrix(byte, scale, kind, COLUMNS, DEPTH, PACKED)
        total = tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)
        x_at += DEPTH
        block_at += DEPTH // 2
        scale = following
    if RANK:
        total = add_low_rank(
            total, kind, low_ptr, up_ptr, row, there, column, column < outputs, expert, rank, up_expert, up_output, up_rank,
            RANK, False, PRECISION,
        )  # fmt: skip
    mask = there & (column < outputs)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(place, total.to(kind), mask=mask)


@triton.jit
def _open_kernel(block_ptr, scale_ptr, out_ptr, count, GROUPS: tl.constexpr):
    """Dequantise some blocks of 32 numbers."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    at = tl.arange(0, 16)[None, :]
    byte = tl.load(block_ptr + group[:, None] * 16 + at, mask=inside[:, None], other=0)
    scale = tl.load(scale_ptr + group, mask=inside, other=0)
    low, high = _numbers(byte, _power(scale)[:, None])
    both = tl.reshape(tl.join(low, high), [GROUPS, 32])
    place = out_ptr + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(place, both.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def tile_of(each: float, columns: int) -> Tile:
    """Return a fast tile for this many rows of an expert, on average, and matrices `columns` outputs at a time.

    In tiles of fewer than 64 rows the compiler changes the order of the inputs: numerics.exact does not use them.
    """
    rows = 64 if exact.enabled() else next((rows for rows in (16, 32) if each <= rows / 2), 64)
    return Tile(rows, columns, 64, 4, 3)


@dataclass(frozen=True, slots=True)
class Low:
    """An adapter's part of a product: sorted rows times its first matrix, scaled, and its second matrix."""

    low_RL: Tensor
    up_EOL: Tensor

    @staticmethod
    def given(low: Low | None, unused: Tensor) -> tuple[Tensor | int, ...]:
        """Return what a kernel is given."""
        if low is None:
            return unused, unused, 0, 0, 0, 0
        return low.low_RL, low.up_EOL, low.low_RL.shape[1], *low.up_EOL.stride()

    @staticmethod
    def width(low: Low | None) -> int:
        """Return the columns of a matrix instruction for the rank; 0 without an adapter."""
        return 0 if low is None else max(16, triton.next_power_of_2(low.low_RL.shape[1]))


def packed_gate_up(
    x_TH: Tensor,
    packed: Packed,
    bias_EO: Tensor,
    rows: Sorted,
    limit: float,
    alpha: float,
    low: Low | None,
    precision: str,
) -> Tensor:
    """Return the inner states [R, I] of sorted rows: product with gate and up, bias, and the activation of gpt-oss."""
    x_TH, inner, tile = x_TH.contiguous(), packed.outputs // 2, tile_of(rows.each, 64)
    out_RI = x_TH.new_empty(len(rows.order_R), inner)
    _gate_up_kernel[(triton.cdiv(inner, tile.columns), blocks(rows, tile.rows))](
        x_TH, packed.blocks, packed.scales, bias_EO, out_RI, rows.order_R, rows.bounds_E, x_TH.shape[1], inner,
        x_TH.stride(0), limit, alpha, rows.experts, *Low.given(low, x_TH), rows.top, triton.next_power_of_2(rows.experts),
        x_TH.shape[1] % tile.depth == 0, _packs(x_TH), tile.rows, tile.columns, tile.depth, Low.width(low), precision,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_RI


def packed_product(x_RX: Tensor, packed: Packed, rows: Sorted, low: Low | None, precision: str) -> Tensor:
    """Return sorted rows times the matrix of their expert, [R, O]."""
    x_RX, outputs, tile = x_RX.contiguous(), packed.outputs, tile_of(rows.each, 128)
    out_RO = x_RX.new_empty(len(x_RX), outputs)
    _product_kernel[(triton.cdiv(outputs, tile.columns), blocks(rows, tile.rows))](
        x_RX, packed.blocks, packed.scales, out_RO, rows.bounds_E, x_RX.shape[1], outputs, rows.experts, *Low.given(low, x_RX),
        triton.next_power_of_2(rows.experts), x_RX.shape[1] % tile.depth == 0, _packs(x_RX), tile.rows, tile.columns,
        tile.depth, Low.width(low), precision,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_RO


def _packs(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and since_hopper()


def opened(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Return all matrices of a layer as one tensor [E, O, X]."""
    count = packed.scales.numel()
    out_EOX = torch.empty(
        packed.experts, packed.outputs, packed.inputs, dtype=dtype, device=packed.blocks.device
    )  # fmt: skip
    _open_kernel[(triton.cdiv(count, GROUPS),)](packed.blocks, packed.scales, out_EOX, count, GROUPS)
    return out_EOX
