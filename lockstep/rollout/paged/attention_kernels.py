"""Triton kernels for paged decode attention, and for merging its partial results.

Kernels read the location of each layer's cache from a small table on the device, as an offset from a fixed base address (the
anchor). It is no constant of a launch, so a captured CUDA graph stays valid when the cache is freed for an update and allocated
elsewhere for the next rollout. The table holds offsets, not addresses: the compiler cannot know the alignment of an address
that is read at run time, and attention would take twice as long.

Legend: B rows, H query heads, K key/value heads, D head size, P tokens of a page.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.models.norm_kernels import scaled
from lockstep.models.ordered_attention import add_block, add_part, weight_of
from lockstep.models.overlap import await_input


@triton.jit
def _head_of(
    x_ptr, at, d, inside, norm_ptr, cos_ptr, sin_ptr, position, eps, offset,
    AXIS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load heads of one token; norm and rotate them, with the model's roundings. AXIS is that of their entries.

    HALF is the number of pairs of a head that are rotated; 0 leaves the heads as they are.
    """
    x = tl.load(x_ptr + at + d, mask=inside, other=0.0)
    if HALF > 0:
        if INTERLEAVED:
            pair_d, angle, low = d ^ 1, d // 2, d % 2 == 0
        else:
            pair_d, angle, low = tl.where(d < HALF, d + HALF, d - HALF), d % HALF, d < HALF
        turned = d < 2 * HALF
        pair_d = tl.where(turned, pair_d, d)
        pair = tl.load(x_ptr + at + pair_d, mask=inside, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, AXIS, keep_dims=True) / D + eps)
            x = scaled(x, scale, norm_ptr, d, d < D, offset, LATE)
            pair = scaled(pair, scale, norm_ptr, pair_d, d < D, offset, LATE)
        angle += position.to(tl.int64) * HALF
        cos = tl.load(cos_ptr + angle, mask=turned, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
        straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
        across = (pair.to(tl.float32) * sin).to(x.dtype).to(tl.float32)
        x = tl.where(turned, tl.where(low, straight - across, straight + across).to(x.dtype), x)
    return x


@triton.jit
def _store_new(key_place, value_place, new_key, value_ptr, d, mask):
    """Store the new token's key and value where they are read from then on, by this program too."""
    new_value = tl.load(value_ptr + d, mask=mask, other=0.0)
    tl.store(key_place + d, new_key.to(key_place.dtype.element_ty), mask=mask)
    tl.store(value_place + d, new_value.to(value_place.dtype.element_ty), mask=mask)
    tl.debug_barrier()


@triton.jit
def _add_block(
    query, peak, mass, total, keys_at, values_at, index, first, keys, scale, softcap, in_head, MASKED: tl.constexpr,
    CAPPED: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to a running softmax, whose exponents are to the base 2.

    Queries are the right operand, of which tensor cores take 8 at a time. A left one would be padded to 16 rows; the query heads
    of one key head are seldom more than 8.
    """
    seen = (index < keys) & (index >= first)
    if MASKED or not WHOLE:  # noqa: SIM108 - the compiler takes one branch
        key = tl.load(keys_at, mask=seen[:, None] & in_head[None, :], other=0.0)
    else:
        key = tl.load(keys_at)
    score = tl.dot(key, query, input_precision=PRECISION)
    if CAPPED:
        score = softcap * (2 / (1 + tl.exp(-2 * score * scale / softcap)) - 1) * 1.4426950408889634
    else:
        score = score * (scale * 1.4426950408889634)
    if MASKED:
        score = tl.where(seen[:, None], score, -float("inf"))
    top = tl.maximum(peak, tl.max(score, 0))
    prob = tl.exp2(score - top[None, :])
    shrink = tl.exp2(peak - top)
    mass = mass * shrink + tl.sum(prob, 0)
    if MASKED or not WHOLE:  # noqa: SIM108
        value = tl.load(values_at, mask=seen[None, :] & in_head[:, None], other=0.0)
    else:
        value = tl.load(values_at)
    total = total * shrink[None, :] + tl.dot(value, prob.to(value.dtype), input_precision=PRECISION)
    return top, mass, total


@triton.jit(do_not_specialize=["layer"])
def attend_kernel(
    query_ptr, key_ptr, value_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, table_ptr, position_ptr, anchor_ptr,
    offset_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, mass_ptr, arrived_ptr, layer, table_stride, query_head_stride,
    query_row_stride, key_head_stride, key_row_stride, value_head_stride, value_row_stride, out_stride, eps, offset, scale,
    softcap, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    NORM: tl.constexpr, LATE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of one row's query heads of one key head over its pages and its new key, or over one of SPLITS parts of
    them; write the new key and value to the last page. `arrived` counts the parts that are there where there are two; it is left
    at 0.
    """
    await_input()
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    WHOLE: tl.constexpr = D == BLOCK_D
    position = tl.load(position_ptr + row)
    first = 0
    if WINDOWED:
        first = tl.maximum(position + 1 - window, 0)
    first_page, pages = first // P, position // P + 1
    share = tl.cdiv(pages - first_page, SPLITS)
    start = first_page + split * share
    end = tl.minimum(start + share, pages)
    g, d, j = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    in_group, in_head = g < G, d < D
    query_at = (head * G + g[None, :]) * query_head_stride + row * query_row_stride
    query = _head_of(
        query_ptr, query_at, d[:, None], in_group[None, :] & in_head[:, None], query_norm_ptr, cos_ptr, sin_ptr, position, eps,
        offset, 0, D, NORM, LATE, HALF, INTERLEAVED,
    )  # fmt: skip
    key_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer), 16) + head * (P * D)
    value_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer + 1), 16) + head * (P * D)
    key_at, value_at = j[:, None] * D + d[None, :], j[None, :] * D + d[:, None]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([BLOCK_D, ROWS], tl.float32)
    page = tl.load(table_ptr + row * table_stride + position // P).to(tl.int64)
    new_at = page * (K * P * D) + (position % P) * D
    new_key = _head_of(
        key_ptr + head * key_head_stride + row * key_row_stride, 0, d, in_head, key_norm_ptr, cos_ptr, sin_ptr, position, eps,
        offset, 0, D, NORM, LATE, HALF, INTERLEAVED,
    )  # fmt: skip
    value_ptr += head * value_head_stride + row * value_row_stride
    owns = (start < pages) & (end == pages)
    _store_new(key_base + new_at, value_base + new_at, new_key, value_ptr, d, in_head & owns)
    keys = position + 1
    # A fully masked block would have no largest score.
    first_block = tl.maximum(start * (P // BLOCK), first // BLOCK)
    blocks = tl.cdiv(tl.minimum(end * P, keys), BLOCK)
    full = tl.minimum(blocks, keys // BLOCK)  # blocks that need no mask
    for block in range(first_block, full):
        page = tl.load(table_ptr + row * table_stride + block * BLOCK // P).to(tl.int64)
        at = page * (K * P * D) + (block * BLOCK % P) * D
        peak, mass, total = _add_block(
            query, peak, mass, total, key_base + at + key_at, value_base + at + value_at,
            block * BLOCK + j, first, keys, scale, softcap, in_head, WINDOWED, CAPPED, WHOLE, PRECISION,
        )  # fmt: skip
    for block in range(tl.maximum(first_block, full), blocks):
        page = tl.load(table_ptr + row * table_stride + block * BLOCK // P).to(tl.int64)
        at = page * (K * P * D) + (block * BLOCK % P) * D
        peak, mass, total = _add_block(
            query, peak, mass, total, key_base + at + key_at, value_base + at + value_at,
            block * BLOCK + j, first, keys, scale, softcap, in_head, True, CAPPED, WHOLE, PRECISION,
        )  # fmt: skip
    out_at = row * out_stride + (head * G + g[None, :]) * D + d[:, None]
    inside = in_group[None, :] & in_head[:, None]
    sink_at = sinks_ptr + head * G + g
    if SPLITS == 1:
        _store_result(peak, mass, total, sink_at, in_group, out_ptr + out_at, inside, SINKS)
    else:
        part = (row * H + head * G + g) * SPLITS + split
        _store_part(
            peak, mass, total, peak_ptr, mass_ptr, part_ptr, part, arrived_ptr + row * K + head, split, sink_at, d, in_group,
            out_ptr + out_at, inside, D, SPLITS, SINKS,
        )  # fmt: skip


@triton.jit
def _store_part(
    peak, mass, total, peak_ptr, mass_ptr, part_ptr, part, arrived, split, sink_at, d, in_group, out_at, inside,
    D: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store a part of a row's attention; the second of two merges both, which takes less time than another kernel."""
    tl.store(peak_ptr + part, peak, mask=in_group)
    tl.store(mass_ptr + part, mass, mask=in_group)
    tl.store(part_ptr + part[None, :] * D + d[:, None], total, mask=inside)
    if SPLITS == 2:
        tl.debug_barrier()  # all of it is there before it is counted
        if tl.atomic_add(arrived, 1) == 1:
            tl.store(arrived, 0)
            both = _merged(
                peak, mass, total, peak_ptr, mass_ptr, part_ptr, part + 1 - 2 * split, split, d, in_group, inside, D
            )
            _store_result(*both, sink_at, in_group, out_at, inside, SINKS)


@triton.jit
def _merged(peak, mass, total, peak_ptr, mass_ptr, part_ptr, other, split, d, in_group, inside, D: tl.constexpr):
    """Merge this program's part with the other, which is stored: in the order of the parts, whichever of them this one is."""
    other_peak = tl.load(peak_ptr + other, mask=in_group, other=0.0, cache_modifier=".cg")
    other_mass = tl.load(mass_ptr + other, mask=in_group, other=0.0, cache_modifier=".cg")
    at = part_ptr + other[None, :] * D + d[:, None]
    other_total = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    top = tl.maximum(peak, other_peak)
    own_weight, other_weight = tl.exp2(peak - top), tl.exp2(other_peak - top)
    own_first = split == 0
    weight_1, weight_2 = tl.where(own_first, own_weight, other_weight), tl.where(own_first, other_weight, own_weight)
    mass_1, mass_2 = tl.where(own_first, mass, other_mass), tl.where(own_first, other_mass, mass)
    total_1, total_2 = tl.where(own_first, total, other_total), tl.where(own_first, other_total, total)
    return top, weight_1 * mass_1 + weight_2 * mass_2, total_1 * weight_1[None, :] + total_2 * weight_2[None, :]


@triton.jit
def _store_result(peak, mass, total, sink_at, in_group, out_at, inside, SINKS: tl.constexpr):
    """Store a row's attention, its weights divided by their sum."""
    if SINKS:
        sink = tl.load(sink_at, mask=in_group, other=0.0).to(tl.float32)
        mass += tl.exp2(sink * 1.4426950408889634 - peak)
    tl.store(out_at, (total / mass[None, :]).to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    part_ptr,
    peak_ptr,
    mass_ptr,
    sinks_ptr,
    out_ptr,
    out_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the parts of one head of one row."""
    await_input()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    at = (row * H + head) * SPLITS + s
    peaks, masses = tl.load(peak_ptr + at), tl.load(mass_ptr + at)
    peak = tl.max(peaks, 0)
    weight = tl.where(masses > 0, tl.exp2(peaks - peak), 0.0)
    mass = tl.sum(weight * masses, 0)
    if SINKS:
        mass += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634 - peak)
    filled = (d[None, :] < D) & (masses[:, None] > 0)
    parts = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=filled, other=0.0)
    total = tl.sum(parts * weight[:, None], 0) / mass
    tl.store(out_ptr + row * out_stride + head * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _ordered_part(
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
def _store_ordered(peak, mass, total, sink_at, out_at, g, d, in_group, factor, SUNK: tl.constexpr):
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
    query = _head_of(
        query_ptr, query_at, d[None, :], in_group[:, None] & (d < D)[None, :], query_ptr, cos_ptr, sin_ptr, position, 0.0,
        0.0, 1, D, False, False, HALF, INTERLEAVED,
    )  # fmt: skip
    key_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer), 16) + head * (P * D)
    value_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer + 1), 16) + head * (P * D)
    ones = tl.full([P, ONES], 1.0, out_ptr.dtype.element_ty)
    table_at = table_ptr + row * table_stride
    new_at = tl.load(table_at + position // P).to(tl.int64) * (K * P * D) + (position % P) * D
    new_key = _head_of(
        key_ptr + head * key_head_stride + row * key_row_stride, 0, d, d < D, key_ptr, cos_ptr, sin_ptr, position, 0.0, 0.0,
        0, D, False, False, HALF, INTERLEAVED,
    )  # fmt: skip
    value_ptr += head * value_head_stride + row * value_row_stride
    owns = (end - 1 - begin) % programs == split  # the last part
    _store_new(key_base + new_at, value_base + new_at, new_key, value_ptr, d, (d < D) & owns)
    sink_at, out_at = sinks_ptr + head * G + g, out_ptr + row * out_stride + head * G * D
    if not SHARED:
        if not PARTED:
            peak, mass, total = _ordered_part(
                query, key_base, value_base, table_at, first, begin, keys, window, ones, factor, K * P * D, P, BLOCKS, WINDOWED
            )  # fmt: skip
        else:
            peak = tl.full([ROWS], -float("inf"), tl.float32)
            mass = tl.zeros([ROWS, ONES], tl.float32)
            total = tl.zeros([ROWS, D], tl.float32)
            for part in range(begin, end):
                part_peak, part_mass, part_total = _ordered_part(
                    query, key_base, value_base, table_at, first, part, keys, window, ones, factor, K * P * D, P, BLOCKS,
                    WINDOWED,
                )  # fmt: skip
                peak, mass, total = add_part(peak, mass, total, part_peak, part_mass, part_total, factor)
        _store_ordered(peak, mass, total, sink_at, out_at, g, d, in_group, factor, SUNK)
    else:
        stored = (row * H + head * G + g) * most
        for part in range(begin + split, end, programs):
            peak, mass, total = _ordered_part(
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
            peak = tl.full([ROWS], -float("inf"), tl.float32)
            mass = tl.zeros([ROWS, ONES], tl.float32)
            total = tl.zeros([ROWS, D], tl.float32)
            for part in range(0, end - begin):
                place = stored + part
                part_peak = tl.load(peak_ptr + place, mask=in_group, other=0.0, cache_modifier=".cg")
                part_mass = tl.load(mass_ptr + place, mask=in_group, other=0.0, cache_modifier=".cg")
                at = total_ptr + place[:, None] * D + d[None, :]
                part_total = tl.load(at, mask=in_group[:, None], other=0.0, cache_modifier=".cg")
                peak, mass, total = add_part(peak, mass, total, part_peak, part_mass[:, None], part_total, factor)
            _store_ordered(peak, mass, total, sink_at, out_at, g, d, in_group, factor, SUNK)
