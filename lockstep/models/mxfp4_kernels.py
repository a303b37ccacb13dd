"""Triton kernels that multiply by experts' matrices in MXFP4: they dequantise a tile at a time, or the whole matrix.

The weights are the left operand, which Hopper's tensor cores take from registers: a number goes there from its code, not by
shared memory. Sums run over the inputs from first to last, as in expert_kernels: the results are those of a dense copy, to the
bit.

Legend: T tokens, K experts of each, R = T · K rows, E experts, H hidden, I inner width, O outputs, X inputs, S steps of
DEPTH inputs, L rank of adapters.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.device import shared_memory, since_hopper
from lockstep.models import mxfp4
from lockstep.models.activation_kernels import activated, add_low_rank
from lockstep.models.mxfp4 import Packed
from lockstep.models.ordered_product_kernel import Tile
from lockstep.models.overlap import await_input, overlap
from lockstep.models.route_kernels import Sorted, block_of, blocks

FIRST, SIGN = tl.constexpr(mxfp4.FIRST), tl.constexpr(mxfp4.SIGN)
EXPONENT, MANTISSA = tl.constexpr(mxfp4.EXPONENT), tl.constexpr(mxfp4.MANTISSA)
OUTPUTS = 64
"""Outputs of which one program dequantises a step of inputs."""
SCALE_PAIR: tl.constexpr = tl.constexpr("{\n.reg .b32 both;\nmul.rn.bf16x2 both, $2, $3;\nmov.b32 {$0, $1}, both;\n}")
"""Multiplies two bf16 numbers in one register, $2, by those in $3, into $0 and $1."""


@triton.jit
def _pair(bits, power, kind: tl.constexpr, HALVES: tl.constexpr):
    """Return the number in the low half of `bits` and that in the high half, both times the power in either half of `power`."""
    if HALVES:
        kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        low, high = tl.inline_asm_elementwise(SCALE_PAIR, "=h,=h,r,r", [bits, power], dtype=kinds, is_pure=True, pack=1)
    else:
        power = (power << 16).to(tl.float32, bitcast=True)
        low = (bits << 16).to(tl.float32, bitcast=True) * power
        high = ((bits >> 16) << 16).to(tl.float32, bitcast=True) * power
    return tl.join(low.to(kind), high.to(kind))


@triton.jit
def _matrix(word, power, kind: tl.constexpr, HALVES: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """Dequantise a tile of a matrix, [OUTPUTS, DEPTH]: `Packed` says where a word holds which bits of which number.

    HALVES: by instructions for two bf16 numbers at a time.
    """
    power = power.to(tl.int32)
    power = power | (power << 16)
    word = tl.reshape(word, [OUTPUTS, DEPTH // 32, 4])
    power = tl.broadcast_to(power[:, :, None], [OUTPUTS, DEPTH // 32, 4])
    first = _pair(word & FIRST, power, kind, HALVES)
    second = _pair((word << 3) & FIRST, power, kind, HALVES)
    third = _pair((word << 6) & FIRST, power, kind, HALVES)
    bits = ((word << 1) & SIGN) | ((word >> 3) & EXPONENT) | ((word >> 7) & MANTISSA)
    number = tl.join(tl.join(first, second), tl.join(third, _pair(bits, power, kind, HALVES)))
    return tl.reshape(tl.permute(number, [0, 1, 5, 4, 2, 3]), [OUTPUTS, DEPTH])


@triton.jit
def _sums(
    x_ptr, source, there, x_stride, word_ptr, power_ptr, expert, output, outputs, kind: tl.constexpr, STEPS: tl.constexpr,
    HALVES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of an expert's matrix and rows of x, in fp32, [OUTPUTS, ROWS].

    STEPS is known to the compiler: a loop that might not run at all would make it wait for each instruction of the tensor cores.
    """
    x_at = x_ptr + source.to(tl.int64)[:, None] * x_stride + tl.arange(0, DEPTH)[None, :]
    place = (expert.to(tl.int64) * STEPS * outputs + output)[:, None]
    word_at = word_ptr + place * (DEPTH // 8) + tl.arange(0, DEPTH // 8)[None, :]
    power_at = power_ptr + place * (DEPTH // 32) + tl.arange(0, DEPTH // 32)[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for _ in range(0, STEPS):
        x = tl.load(x_at, mask=there[:, None], other=0.0)
        weight = _matrix(tl.load(word_at), tl.load(power_at), kind, HALVES, OUTPUTS, DEPTH)
        total = tl.dot(weight, x.T, total, input_precision=PRECISION)
        if HALVES:  # a use of the sums: else the next step's weights go to registers that the tensor cores still read
            total = tl.inline_asm_elementwise("", "=r,0", [total], dtype=tl.float32, is_pure=True, pack=1)
        x_at += DEPTH
        word_at += outputs * (DEPTH // 8)
        power_at += outputs * (DEPTH // 32)
    return total


@triton.jit
def _gate_up_rows(
    x_ptr, word_ptr, power_ptr, bias_ptr, out_ptr, order_ptr, expert, first, end, inner, x_stride, limit, alpha, low_ptr, up_ptr,
    rank, up_expert, up_output, up_rank, TOP: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kind = out_ptr.dtype.element_ty
    row, column = first + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    both = (tl.program_id(0) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)) % (2 * inner)
    there = row < end
    token = tl.load(order_ptr + row, mask=there, other=0) // TOP
    total = _sums(
        x_ptr, token, there, x_stride, word_ptr, power_ptr, expert, both, 2 * inner, kind, STEPS, HALVES, ROWS, 2 * COLUMNS,
        DEPTH, PRECISION,
    )  # fmt: skip
    total = total.to(kind).to(tl.float32)
    if RANK:
        total = add_low_rank(
            total, kind, low_ptr, up_ptr, row, there[:, None], both, both >= 0, expert, rank, up_expert, up_output, up_rank,
            RANK, True, PRECISION,
        )  # fmt: skip
    bias = tl.load(bias_ptr + expert * 2 * inner + both).to(tl.float32)
    total = (total + bias[:, None]).to(kind).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(total, [COLUMNS, 2, ROWS]), [0, 2, 1]))
    state = activated(gate, up, True, limit, alpha)
    place = out_ptr + row.to(tl.int64)[None, :] * inner + column[:, None]
    tl.store(place, state.to(kind), mask=there[None, :] & (column < inner)[:, None])


@triton.jit
def _gate_up_kernel(
    x_ptr, word_ptr, power_ptr, bias_ptr, out_ptr, order_ptr, bounds_ptr, inner, x_stride, limit, alpha, experts, low_ptr, up_ptr,
    rank, up_expert, up_output, up_rank, TOP: tl.constexpr, EXPERTS: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the inner states of one block of an expert's rows; gates and ups alternate."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    given = (
        x_ptr, word_ptr, power_ptr, bias_ptr, out_ptr, order_ptr, expert, first, end, inner, x_stride, limit, alpha, low_ptr,
        up_ptr, rank, up_expert, up_output, up_rank,
    )  # fmt: skip
    if end - first <= ROWS // 2:
        _gate_up_rows(*given, TOP, STEPS, HALVES, ROWS // 2, COLUMNS, DEPTH, RANK, PRECISION)
    else:
        _gate_up_rows(*given, TOP, STEPS, HALVES, ROWS, COLUMNS, DEPTH, RANK, PRECISION)


@triton.jit
def _product_rows(
    x_ptr, word_ptr, power_ptr, out_ptr, expert, first, end, outputs, low_ptr, up_ptr, rank, up_expert, up_output, up_rank,
    STEPS: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kind = out_ptr.dtype.element_ty
    row, column = first + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, output = row < end, column < outputs
    total = _sums(
        x_ptr, row, there, STEPS * DEPTH, word_ptr, power_ptr, expert, column % outputs, outputs, kind, STEPS, HALVES, ROWS,
        COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip
    if RANK:
        total = add_low_rank(
            total, kind, low_ptr, up_ptr, row, there[:, None], column, output, expert, rank, up_expert, up_output, up_rank,
            RANK, True, PRECISION,
        )  # fmt: skip
    place = out_ptr + row.to(tl.int64)[None, :] * outputs + column[:, None]
    tl.store(place, total.to(kind), mask=there[None, :] & output[:, None])


@triton.jit
def _product_kernel(
    x_ptr, word_ptr, power_ptr, out_ptr, bounds_ptr, outputs, experts, low_ptr, up_ptr, rank, up_expert, up_output, up_rank,
    EXPERTS: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one block of an expert's rows times its matrix."""
    await_input()
    expert, first, end = block_of(bounds_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first >= end:
        return
    given = (
        x_ptr, word_ptr, power_ptr, out_ptr, expert, first, end, outputs, low_ptr, up_ptr, rank, up_expert, up_output, up_rank,
    )  # fmt: skip
    if end - first <= ROWS // 2:
        _product_rows(*given, STEPS, HALVES, ROWS // 2, COLUMNS, DEPTH, RANK, PRECISION)
    else:
        _product_rows(*given, STEPS, HALVES, ROWS, COLUMNS, DEPTH, RANK, PRECISION)


@triton.jit
def _open_kernel(
    word_ptr, power_ptr, out_ptr, outputs, STEPS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr
):
    """Dequantise a step of inputs of some outputs of an expert."""
    step, expert = tl.program_id(1), tl.program_id(2).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = (output < outputs)[:, None]
    place = ((expert * STEPS + step) * outputs + output)[:, None]
    word = tl.load(word_ptr + place * (DEPTH // 8) + tl.arange(0, DEPTH // 8)[None, :], mask=inside, other=0)
    power = tl.load(power_ptr + place * (DEPTH // 32) + tl.arange(0, DEPTH // 32)[None, :], mask=inside, other=0)
    number = _matrix(word, power, out_ptr.dtype.element_ty, False, OUTPUTS, DEPTH)
    at = out_ptr + ((expert * outputs + output)[:, None] * STEPS + step) * DEPTH + tl.arange(0, DEPTH)[None, :]
    tl.store(at, number, mask=inside)


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


def tile_of(each: float, columns: int, like: Tensor, depth: int, low: Low | None) -> Tile:
    """Return a fast tile for this many rows of an expert, on average, and matrices `columns` outputs at a time. A block with at
    most half of the tile's rows computes half of them. It does not change a bit.
    """
    rows = (
        32 if each <= 20 else 64 if each <= 40 or low is not None else 128
    )  # no room for an adapter's product beside 128
    stage = rows * depth * like.element_size() + 128 * depth
    return Tile(rows, columns, depth, 4, max(1, min(4, shared_memory(like.device) // stage)))


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
    x_TH, inner, tile = x_TH.contiguous(), packed.outputs // 2, tile_of(rows.each, 64, x_TH, packed.depth, low)
    out_RI = x_TH.new_empty(len(rows.order_R), inner)
    _gate_up_kernel[(triton.cdiv(inner, tile.columns), blocks(rows, tile.rows))](
        x_TH, packed.words, packed.powers, bias_EO, out_RI, rows.order_R, rows.bounds_E, inner, x_TH.stride(0), limit, alpha,
        rows.experts, *Low.given(low, x_TH), rows.top, triton.next_power_of_2(rows.experts), packed.steps, _halves(x_TH),
        tile.rows, tile.columns, tile.depth, Low.width(low), precision,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_RI


def packed_product(x_RX: Tensor, packed: Packed, rows: Sorted, low: Low | None, precision: str) -> Tensor:
    """Return sorted rows times the matrix of their expert, [R, O]."""
    x_RX, outputs, tile = x_RX.contiguous(), packed.outputs, tile_of(rows.each, 128, x_RX, packed.depth, low)
    out_RO = x_RX.new_empty(len(x_RX), outputs)
    _product_kernel[(triton.cdiv(outputs, tile.columns), blocks(rows, tile.rows))](
        x_RX, packed.words, packed.powers, out_RO, rows.bounds_E, outputs, rows.experts, *Low.given(low, x_RX),
        triton.next_power_of_2(rows.experts), packed.steps, _halves(x_RX), tile.rows, tile.columns, tile.depth, Low.width(low),
        precision, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_RO


def _halves(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and since_hopper()


def opened(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Return all matrices of a layer as one tensor [E, O, X]."""
    experts, outputs = packed.experts, packed.outputs
    out_EOX = torch.empty(experts, outputs, packed.inputs, dtype=dtype, device=packed.words.device)
    grid = triton.cdiv(outputs, OUTPUTS), packed.steps, experts
    _open_kernel[grid](packed.words, packed.powers, out_EOX, outputs, packed.steps, OUTPUTS, packed.depth)
    return out_EOX
