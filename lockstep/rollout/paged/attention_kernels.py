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
from lockstep.models.overlap import await_input


@triton.jit
def head_of(
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
def store_new(key_place, value_place, new_key, value_ptr, d, mask):
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
    query = head_of(
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
    new_key = head_of(
        key_ptr + head * key_head_stride + row * key_row_stride, 0, d, in_head, key_norm_ptr, cos_ptr, sin_ptr, position, eps,
        offset, 0, D, NORM, LATE, HALF, INTERLEAVED,
    )  # fmt: skip
    value_ptr += head * value_head_stride + row * value_row_stride
    owns = (start < pages) & (end == pages)
    store_new(key_base + new_at, value_base + new_at, new_key, value_ptr, d, in_head & owns)
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
