"""Triton kernel for paged decode attention with the bits of models.ordered_attention.

Legend: H query heads, K key/value heads, D head size, P tokens of a page.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.models.ordered_attention import add_block, add_part, weight_of
from lockstep.models.overlap import await_input
from lockstep.rollout.paged.attention_kernels import head_of, store_new


@triton.jit
def _part_of(
    query, key_base, value_base, table_at, first, part, keys, window, ones, factor, PAGE_SIZE: tl.constexpr, P: tl.constexpr,
    BLOCKS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Sum over one part of a row's keys, page by page, from page `first` on, as models.ordered_attention does."""
    ROWS: tl.constexpr = query.shape[0]
    D: tl.constexpr = query.shape[1]
    d, j, full = tl.arange(0, D), tl.arange(0, P), keys // P
    key_at, value_at = j[None, :] * D + d[:, None], j[:, None] * D + d[None, :]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS, ones.shape[1]], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    end = part * BLOCKS + BLOCKS
    for block in range(tl.maximum(first, part * BLOCKS), tl.minimum(full, end)):
        at = tl.load(table_at + block).to(tl.int64) * PAGE_SIZE
        key, value = tl.load(key_base + at + key_at), tl.load(value_base + at + value_at)
        seen = block * P + j >= keys - window
        peak, mass, total = add_block(
            query, peak, mass, total, key, value, seen[None, :], ones, factor, WINDOWED, WINDOWED
        )
    if (full * P < keys) & (full < end):
        at = tl.load(table_at + full).to(tl.int64) * PAGE_SIZE
        seen = full * P + j < keys
        key = tl.load(key_base + at + key_at, mask=seen[None, :], other=0.0)
        value = tl.load(value_base + at + value_at, mask=seen[:, None], other=0.0)
        if WINDOWED:
            seen &= full * P + j >= keys - window
        peak, mass, total = add_block(query, peak, mass, total, key, value, seen[None, :], ones, factor, True, WINDOWED)
    return peak, mass, total


@triton.jit
def _merged(
    peak_ptr, mass_ptr, total_ptr, stored, parts, d, in_group, factor, ROWS: tl.constexpr, ONES: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Add the sums of a row's parts, which several programs have stored, in order."""
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS, ONES], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    for part in range(0, parts):
        place = stored + part
        part_peak = tl.load(peak_ptr + place, mask=in_group, other=0.0, cache_modifier=".cg")
        part_mass = tl.load(mass_ptr + place, mask=in_group, other=0.0, cache_modifier=".cg")
        at = total_ptr + place[:, None] * D + d[None, :]
        part_total = tl.load(at, mask=in_group[:, None], other=0.0, cache_modifier=".cg")
        peak, mass, total = add_part(peak, mass, total, part_peak, part_mass[:, None], part_total, factor)
    return peak, mass, total


@triton.jit
def _store(peak, mass, total, sink_at, out_at, g, d, in_group, factor, SUNK: tl.constexpr):
    """Store a row's attention, its weights divided by their sum."""
    sink = tl.load(sink_at, mask=in_group, other=0.0) if SUNK else 0.0
    weight = weight_of(peak, mass, sink, factor, SUNK)
    out = (total / weight[:, None]).to(out_at.dtype.element_ty)
    tl.store(out_at + g[:, None] * total.shape[1] + d[None, :], out, mask=in_group[:, None])


@triton.jit(do_not_specialize=["layer"])
def ordered_attend_kernel(
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, table_ptr, position_ptr, anchor_ptr, offset_ptr, sinks_ptr, out_ptr,
    total_ptr, peak_ptr, mass_ptr, arrived_ptr, most, layer, table_stride, query_head_stride, query_row_stride,
    key_head_stride, key_row_stride, value_head_stride, value_row_stride, out_stride, factor, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr, ONES: tl.constexpr,
    BLOCKS: tl.constexpr, PARTED: tl.constexpr, SHARED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Compute attention of one row's query heads of one key head, page by page, as models.ordered_attention does; write the new
    key and value to the last page.

    PARTED: rows may have several parts, of BLOCKS pages, `most` at most. SHARED: the programs of a row share them and store the
    sums of each. The one that `arrived` last adds them, and leaves 0 there.
    """
    await_input()
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    position = tl.load(position_ptr + row)
    keys = position + 1
    first = tl.maximum(keys - window, 0) // P if WINDOWED else 0
    begin, end = first // BLOCKS, tl.cdiv(keys, P * BLOCKS)
    programs = tl.minimum(tl.num_programs(2), end - begin)
    if split >= programs:
        return
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    in_group = g < G
    query_at = (head * G + g[:, None]) * query_head_stride + row * query_row_stride
    query = head_of(
        query_ptr, query_at, d[None, :], in_group[:, None] & (d < D)[None, :], query_ptr, cos_ptr, sin_ptr, position, 0.0,
        0.0, 1, D, False, False, HALF, INTERLEAVED,
    )  # fmt: skip
    key_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer), 16) + head * (P * D)
    value_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer + 1), 16) + head * (P * D)
    ones = tl.full([P, ONES], 1.0, out_ptr.dtype.element_ty)
    table_at = table_ptr + row * table_stride
    new_at = tl.load(table_at + position // P).to(tl.int64) * (K * P * D) + (position % P) * D
    new_key = head_of(
        key_ptr + head * key_head_stride + row * key_row_stride, 0, d, d < D, key_ptr, cos_ptr, sin_ptr, position, 0.0, 0.0,
        0, D, False, False, HALF, INTERLEAVED,
    )  # fmt: skip
    value_ptr += head * value_head_stride + row * value_row_stride
    owns = (end - 1 - begin) % programs == split  # the last part
    store_new(key_base + new_at, value_base + new_at, new_key, value_ptr, d, (d < D) & owns)
    sink_at, out_at = sinks_ptr + head * G + g, out_ptr + row * out_stride + head * G * D
    if not SHARED:
        if not PARTED:
            peak, mass, total = _part_of(
                query, key_base, value_base, table_at, first, begin, keys, window, ones, factor, K * P * D, P, BLOCKS, WINDOWED
            )  # fmt: skip
        else:
            peak = tl.full([ROWS], -float("inf"), tl.float32)
            mass = tl.zeros([ROWS, ONES], tl.float32)
            total = tl.zeros([ROWS, D], tl.float32)
            for part in range(begin, end):
                part_peak, part_mass, part_total = _part_of(
                    query, key_base, value_base, table_at, first, part, keys, window, ones, factor, K * P * D, P, BLOCKS,
                    WINDOWED,
                )  # fmt: skip
                peak, mass, total = add_part(peak, mass, total, part_peak, part_mass, part_total, factor)
        _store(peak, mass, total, sink_at, out_at, g, d, in_group, factor, SUNK)
    else:
        stored = (row * H + head * G + g) * most
        for part in range(begin + split, end, programs):
            peak, mass, total = _part_of(
                query, key_base, value_base, table_at, first, part, keys, window, ones, factor, K * P * D, P, BLOCKS,
                WINDOWED,
            )  # fmt: skip
            place = stored + part - begin
            tl.store(peak_ptr + place, peak, mask=in_group)
            tl.store(mass_ptr + place, tl.max(mass, 1), mask=in_group)  # its columns are equal
            tl.store(total_ptr + place[:, None] * D + d[None, :], total, mask=in_group[:, None])
        tl.debug_barrier()  # all of it is there before it is counted
        if tl.atomic_add(arrived_ptr + row * K + head, 1) == programs - 1:
            tl.store(arrived_ptr + row * K + head, 0)
            peak, mass, total = _merged(
                peak_ptr, mass_ptr, total_ptr, stored, end - begin, d, in_group, factor, ROWS, ONES, D
            )
            _store(peak, mass, total, sink_at, out_at, g, d, in_group, factor, SUNK)
