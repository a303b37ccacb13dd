"""Batch-invariant causal attention (Triton): a token's result does not depend on the other sequences of the batch.

A query reads the keys of its sequence in blocks that begin at positions that are multiples of KEYS, wherever the keys are
stored: in a packed stream, where a group's prompt is stored once, or in the engine's pages. Training and sampling compute each
block with the same function, and nothing in it depends on the layout of threads: scores and weighted values are chains of
tensor core products, the sum of weights is one too (a product with ones), and a maximum has no order. A block of which a query
sees nothing leaves its sums as they are, so it does not matter whether the block is read.

Sums begin again in every PART of a sequence's keys, and are added part by part. So several programs can share the keys of a token
that is decoded, and add what they found in the same order.

Legend: T queries of a stream, S keys, H query heads, K key/value heads, D head size.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.ordered import FIELDS, QUERIES, Tiles

KEYS = 64
"""Keys of a block."""
PART = 1024
"""Keys of a part."""
ONES = 16
"""Columns of the product that sums weights: the fewest of a tensor core product in Triton."""
LOG2_E = 1.4426950408889634


@triton.jit
def add_block(query, peak, mass, total, key, value, seen, ones, factor, MASKED: tl.constexpr, EMPTY: tl.constexpr):
    """Add one block of keys to a running softmax; `factor` is the scale of the scores for exponents to the base 2.

    EMPTY: a query may have seen nothing so far.
    """
    score = tl.dot(query, key)
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    top = tl.maximum(peak, tl.max(score, 1))
    low = -(top * factor)
    if EMPTY:
        low = tl.where(top == -float("inf"), 0.0, low)
    prob = tl.exp2(tl.fma(score, factor, low[:, None])).to(value.dtype)
    shrink = tl.exp2((peak - top) * factor)  # exactly 1 for a block of which nothing is seen
    if EMPTY:
        shrink = tl.where(top == -float("inf"), 1.0, shrink)
    shrink = shrink[:, None]
    mass = tl.dot(prob, ones, mass * shrink)
    total = tl.dot(prob, value, total * shrink)
    return top, mass, total


@triton.jit
def add_part(peak, mass, total, part_peak, part_mass, part_total, factor):
    """Add the sums of a part of the keys to those of the parts before it; one of which nothing is seen changes nothing."""
    top = tl.maximum(peak, part_peak)
    old = tl.where(peak == top, 1.0, tl.exp2((peak - top) * factor))[:, None]  # equal ones may both be -inf
    new = tl.where(part_peak == top, 1.0, tl.exp2((part_peak - top) * factor))[:, None]
    return top, mass * old + part_mass * new, total * old + part_total * new


@triton.jit
def weight_of(peak, mass, sink, factor, SUNK: tl.constexpr):
    """Return the sum of a query's weights, with its head's sink if there is one."""
    weight = tl.max(mass, 1)  # its columns are equal
    if SUNK:
        weight += tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - peak * factor)
    return weight


@triton.jit
def tile_at(at):
    """Load the numbers of a tile: first query, queries, position of the first; where two parts of its keys end, and the distance
    of a position from its place in the stream in these and in the rest.
    """
    start, count, position = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return start, count, position, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)


@triton.jit
def _part_of(
    query, key_ptr, value_ptr, tile_ptr, kv, begin, end, full, ones, factor, window, row: tl.constexpr,
    WINDOWED: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Sum over one part of a tile's keys, blocks `begin` up to `end`; every query sees those before `full` as a whole."""
    QUERIES: tl.constexpr = query.shape[0]
    KEYS: tl.constexpr = ones.shape[0]
    _, count, position, end0, end1, shift0, shift1, shift2 = tile_at(tile_ptr)
    i, j, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, query.shape[1])
    keys = position + count
    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    mass = tl.zeros([QUERIES, ones.shape[1]], tl.float32)
    total = tl.zeros([QUERIES, query.shape[1]], tl.float32)
    for block in range(begin, tl.minimum(end, full)):
        index = block * KEYS + j
        place = index + tl.where(index < end0, shift0, tl.where(index < end1, shift1, shift2))
        key = tl.load(key_ptr + place[None, :] * row + kv + d[:, None])
        value = tl.load(value_ptr + place[:, None] * row + kv + d[None, :])
        seen = (index <= position)[None, :]
        peak, mass, total = add_block(query, peak, mass, total, key, value, seen, ones, factor, False, False)
    for block in range(tl.maximum(begin, full), end):
        index = block * KEYS + j
        place = index + tl.where(index < end0, shift0, tl.where(index < end1, shift1, shift2))
        there = index < keys
        key = tl.load(key_ptr + place[None, :] * row + kv + d[:, None], mask=there[None, :], other=0.0)
        value = tl.load(value_ptr + place[:, None] * row + kv + d[None, :], mask=there[:, None], other=0.0)
        seen = index[None, :] <= (position + i)[:, None]
        if WINDOWED:
            seen &= index[None, :] > (position + i - window)[:, None]
        peak, mass, total = add_block(query, peak, mass, total, key, value, seen, ones, factor, True, EMPTY)
    return peak, mass, total


@triton.jit
def stream_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, tiles_ptr, sinks_ptr, scale, factor, tokens, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ONES: tl.constexpr,
    FIELDS: tl.constexpr, BLOCKS: tl.constexpr, PARTED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of queries of one head. PARTED: there may be several parts, of BLOCKS blocks of keys."""
    tile_ptr, head = tiles_ptr + tl.program_id(0) * FIELDS, tl.program_id(1)
    start, count, position, _, _, _, _, _ = tile_at(tile_ptr)
    i, d = tl.arange(0, QUERIES), tl.arange(0, D)
    own = (start + i)[:, None] * (H * D) + head * D + d[None, :]
    query = tl.load(query_ptr + own, mask=(i < count)[:, None], other=0.0)
    kv = (head // (H // K)) * D
    ones = tl.full([KEYS, ONES], 1.0, value_ptr.dtype.element_ty)
    begin, full = 0, (position + 1) // KEYS
    if WINDOWED:
        begin = tl.maximum(position + 1 - window, 0) // KEYS
        full = begin
    last = tl.cdiv(position + count, KEYS)
    if not PARTED:
        peak, mass, total = _part_of(
            query, key_ptr, value_ptr, tile_ptr, kv, begin, last, full, ones, factor, window, K * D, WINDOWED,
            WINDOWED,
        )  # fmt: skip
    else:
        peak = tl.full([QUERIES], -float("inf"), tl.float32)
        mass = tl.zeros([QUERIES, ONES], tl.float32)
        total = tl.zeros([QUERIES, D], tl.float32)
        for part in range(begin // BLOCKS, tl.cdiv(last, BLOCKS)):
            part_peak, part_mass, part_total = _part_of(
                query, key_ptr, value_ptr, tile_ptr, kv, tl.maximum(begin, part * BLOCKS),
                tl.minimum(last, part * BLOCKS + BLOCKS), full, ones, factor, window, K * D, WINDOWED, True,
            )  # fmt: skip
            peak, mass, total = add_part(peak, mass, total, part_peak, part_mass, part_total, factor)
    sink = tl.load(sinks_ptr + head) if SUNK else 0.0
    weight = weight_of(peak, mass, sink, factor, SUNK)
    tl.store(out_ptr + own, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=(i < count)[:, None])
    tl.store(lse_ptr + head * tokens + start + i, peak * scale + tl.log(weight), mask=i < count)


def stream_attention(
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    tiles: Tiles,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and fp32 log-sum-exps [H, T] of the tiles; the inputs are contiguous.

    Window and sinks are those of an AttentionKind; log-sum-exps include the sinks. No gradient.
    """
    tokens, heads, size = query_THD.shape
    out_THD = torch.empty_like(query_THD)
    lse_HT = query_THD.new_empty(heads, tokens, dtype=torch.float32)
    parted = tiles.keys > PART
    stream_kernel[(len(tiles.table), heads)](
        query_THD, key_SKD, value_SKD, out_THD, lse_HT, tiles.table, lse_HT if sinks_H is None else sinks_H, scale,
        scale * LOG2_E, tokens, window or 0, heads, key_SKD.shape[1], size, QUERIES, KEYS, ONES, FIELDS, PART // KEYS,
        parted, window is not None, sinks_H is not None, num_warps=8, num_stages=3, enable_fp_fusion=False,
        maxnreg=128 if parted and size <= 64 else None,  # two programs run side by side on a multiprocessor
    )  # fmt: skip
    return out_THD, lse_HT
