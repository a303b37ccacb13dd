"""A matrix multiplication that sums over K from first to last, whatever the number of rows (Triton).

On Hopper its results equal those of cuBLAS without split K bit for bit, for any tile: tensor cores add 16 products at a time to
one running sum.

Legend: M rows, N outputs, K inputs.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.device import shared_memory
from lockstep.models.overlap import await_input, overlap

PART = 1024
"""Inputs of one part of a narrow product."""
FEW, MANY = 64, 3072
"""Rows up to which a program has all of them, and outputs that are enough for every multiprocessor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of the result, and how it is computed. None of it changes a bit."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(rows: int, outputs: int) -> Tile:
    """Return a fast tile. Few outputs take few columns each, so that there are programs for every multiprocessor."""
    if rows > 512:
        return Tile(128, 128, 64, 8, 4) if outputs >= 128 else Tile(128, 32, 64, 4, 4)
    if outputs >= 8192:
        return Tile(32, 64, 256, 4, 3) if rows <= 32 else Tile(64, 128, 64, 4, 4)
    if rows <= FEW:
        least = 16 if rows <= 16 else 32 if rows <= 32 else 64
        if outputs > 4096:
            return Tile(least, 64, 128, 4, 5)
        if rows <= 32:
            return Tile(least, 16, 256, 2, 5)
        return Tile(64, 32, 128, 4, 6) if outputs >= MANY else Tile(64, 16, 128, 4, 7)
    if rows <= 128:
        return Tile(64, 32, 256, 4, 4)
    return Tile(16, 32, 512, 4, 3) if outputs <= 64 else Tile(64, 64, 128, 4, 6)


def _fitted(tile: Tile, like: Tensor) -> Tile:
    """Return the tile with no more stages than the GPU's shared memory has room for."""
    stage = (tile.rows + tile.columns) * tile.depth * like.element_size()
    return replace(tile, stages=max(1, min(tile.stages, shared_memory(like.device) // stage)))


def narrow_tile(rows: int) -> Tile:
    """Return a fast tile of `narrow_product`."""
    if rows <= 64:
        return Tile(16, 16, 256, 4, 3)
    return Tile(32, 32, 256, 4, 3) if rows <= 1024 else Tile(128, 32, 64, 4, 4)


@triton.jit
def _product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, x_stride, weight_stride, out_stride, alpha,
    BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    await_input()
    program = tl.program_id(0)
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    band = program // (GROUP * across)
    height = tl.minimum(down - band * GROUP, GROUP)
    within = program % (GROUP * across)
    row = (band * GROUP + within % height) * ROWS + tl.arange(0, ROWS)
    column = (within // height) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + (row % M).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + (column % N).to(tl.int64)[None, :] * weight_stride + k[:, None]
    if PARTS:
        start = tl.program_id(1) * PART
        x_at += start
        weight_at += start
        out_ptr += tl.program_id(1).to(tl.int64) * M * N
        K = tl.minimum(K - start, PART)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, tl.cdiv(K, DEPTH)):
        if EVEN:
            x, weight = tl.load(x_at), tl.load(weight_at)
        else:
            left = k < K - step * DEPTH
            x = tl.load(x_at, mask=left[None, :], other=0.0)
            weight = tl.load(weight_at, mask=left[:, None], other=0.0)
        total = tl.dot(x, weight, total)
        x_at += DEPTH
        weight_at += DEPTH
    total = total * alpha
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


def product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, alpha: float, out_MN: Tensor, tile: Tile) -> Tensor:
    """Write alpha · x @ weight.T + bias to `out_MN`."""
    (rows, inputs), outputs, tile = x_MK.shape, weight_NK.shape[0], _fitted(tile, x_MK)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns),)
    _product_kernel[grid](
        x_MK, weight_NK, weight_NK if bias_N is None else bias_N, out_MN, rows, outputs, inputs,
        x_MK.stride(0), weight_NK.stride(0), out_MN.stride(0), alpha, bias_N is not None, inputs % tile.depth == 0,
        tile.rows, tile.columns, tile.depth, 8, False, PART,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_MN


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, count, alpha, parts, out_stride, N: tl.constexpr, BLOCK: tl.constexpr):
    await_input()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, parts):
        total += tl.load(parts_ptr + at, mask=live, other=0.0)
        parts_ptr += count
    place = (at // N).to(tl.int64) * out_stride + at % N
    tl.store(out_ptr + place, (total * alpha).to(out_ptr.dtype.element_ty), mask=live)


def side_sums(x_MK: Tensor, weight_NK: Tensor, part: int, tile: Tile) -> Tensor:
    """Return x @ weight.T over `part` inputs each, side by side: fp32 [parts, M, N]. For any number of rows."""
    (rows, inputs), outputs, tile = x_MK.shape, weight_NK.shape[0], _fitted(tile, x_MK)
    parts = triton.cdiv(inputs, part)
    sums = x_MK.new_empty(parts, rows, outputs, dtype=torch.float32)
    even = inputs % tile.depth == 0 and part % tile.depth == 0
    _product_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns), parts)](
        x_MK, weight_NK, weight_NK, sums, rows, outputs, inputs, x_MK.stride(0), weight_NK.stride(0), outputs, 1.0,
        False, even, tile.rows, tile.columns, tile.depth, 8, True, part,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return sums


def narrow_product(x_MK: Tensor, weight_NK: Tensor, alpha: float, out_MN: Tensor, tile: Tile) -> Tensor:
    """Write alpha · x @ weight.T to `out_MN`: sums over PART inputs each, side by side, and these sums in order.

    For few outputs and many inputs, of which one chain of sums would leave most of the device idle. For any number of rows.
    """
    rows, outputs = x_MK.shape[0], weight_NK.shape[0]
    sums = side_sums(x_MK, weight_NK, PART, tile)
    _sum_kernel[(triton.cdiv(rows * outputs, 256),)](
        sums, out_MN, rows * outputs, alpha, len(sums), out_MN.stride(0), outputs, 256,
        num_warps=2, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out_MN
