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
from lockstep.models.ordered_attention import add_block, add_values, weight_of, weights_of
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
def _weights_of(
    query, peak, mass, key, seen, scale, softcap, MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add the weights of one block of keys to a running softmax, whose exponents are to the base 2; return also the weights, and
    the factor of what was added before.
    """
    score = tl.dot(query, key, input_precision=PRECISION)
    if CAPPED:
        score = softcap * (2 / (1 + tl.exp(-2 * score * scale / softcap)) - 1) * 1.4426950408889634
    else:
        score = score * (scale * 1.4426950408889634)
    if MASKED:
        score = tl.where(seen[None, :], score, -float("inf"))
    top = tl.maximum(peak, tl.max(score, 1))
    prob = tl.exp2(score - top[:, None])
    shrink = tl.exp2(peak - top)
    return top, mass * shrink + tl.sum(prob, 1), prob.to(key.dtype), shrink[:, None]


@triton.jit
def _with_new(
    base, new, row_axis: tl.constexpr, place, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):
    """Load a block up to its new key or value, and return it with that: keys are its columns (row_axis 1), values its rows.

    The new one is put in from registers: what a program has just written, it could not read safely.
    """
    d, j = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    if row_axis == 1:
        block = tl.load(base + j[None, :] * D + d[:, None], mask=(j < place)[None, :] & inside[:, None], other=0.0)
        block = tl.where((j == place)[None, :], new[:, None], block)
    else:
        block = tl.load(base + j[:, None] * D + d[None, :], mask=(j < place)[:, None] & inside[None, :], other=0.0)
        block = tl.where((j == place)[:, None], new[None, :], block)
    return block


@triton.jit
def attend_kernel(
    query_ptr, key_ptr, value_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, table_ptr, position_ptr, anchor_ptr,
    offset_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, mass_ptr, layer, table_stride, query_head_stride, query_row_stride,
    key_head_stride, key_row_stride, value_head_stride, value_row_stride, out_stride, eps, offset, scale, softcap, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    NORM: tl.constexpr, LATE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of one row's query heads of one key head over its pages and its new key, or over one of SPLITS parts of
    them; write the new key and value to the last page.
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
    query_at = (head * G + g[:, None]) * query_head_stride + row * query_row_stride
    query = _head_of(
        query_ptr, query_at, d[None, :], in_group[:, None] & in_head[None, :], query_norm_ptr, cos_ptr, sin_ptr, position, eps,
        offset, 1, D, NORM, LATE, HALF, INTERLEAVED,
    )  # fmt: skip
    key_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer), 16) + head * (P * D)
    value_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer + 1), 16) + head * (P * D)
    key_at, value_at = j[None, :] * D + d[:, None], j[:, None] * D + d[None, :]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    last, place = position // BLOCK, position % BLOCK  # the new key's block, and its place there
    owns = (start < pages) & (end == pages)
    page = tl.load(table_ptr + row * table_stride + position // P).to(tl.int64)
    last_keys = key_base + page * (K * P * D) + (last * BLOCK % P) * D
    last_values = value_base + page * (K * P * D) + (last * BLOCK % P) * D
    new_key = _head_of(
        key_ptr + head * key_head_stride + row * key_row_stride, 0, d, in_head, key_norm_ptr, cos_ptr, sin_ptr, position, eps,
        offset, 0, D, NORM, LATE, HALF, INTERLEAVED,
    ).to(key_base.dtype.element_ty)  # fmt: skip
    value_ptr += head * value_head_stride + row * value_row_stride
    new_value = tl.load(value_ptr + d, mask=in_head, other=0.0).to(value_base.dtype.element_ty)
    tl.store(last_keys + place * D + d, new_key, mask=in_head & owns)
    tl.store(last_values + place * D + d, new_value, mask=in_head & owns)
    # A fully masked block would have no largest score.
    first_block = tl.maximum(start * (P // BLOCK), first // BLOCK)
    for block in range(first_block, tl.minimum(end * (P // BLOCK), last)):
        page = tl.load(table_ptr + row * table_stride + block * BLOCK // P).to(tl.int64)
        at = page * (K * P * D) + (block * BLOCK % P) * D
        seen = block * BLOCK + j >= first
        if WINDOWED or not WHOLE:
            key = tl.load(key_base + at + key_at, mask=seen[None, :] & in_head[:, None], other=0.0)
            value = tl.load(value_base + at + value_at, mask=seen[:, None] & in_head[None, :], other=0.0)
        else:
            key, value = tl.load(key_base + at + key_at), tl.load(value_base + at + value_at)
        peak, mass, prob, shrink = _weights_of(
            query, peak, mass, key, seen, scale, softcap, WINDOWED, CAPPED, PRECISION
        )
        total = total * shrink + tl.dot(prob, value, input_precision=PRECISION)
    if owns:
        key = _with_new(last_keys, new_key, 1, place, in_head, D, BLOCK_D, BLOCK)
        seen = (j <= place) & (last * BLOCK + j >= first)
        peak, mass, prob, shrink = _weights_of(query, peak, mass, key, seen, scale, softcap, True, CAPPED, PRECISION)
        value = _with_new(last_values, new_value, 0, place, in_head, D, BLOCK_D, BLOCK)
        total = total * shrink + tl.dot(prob, value, input_precision=PRECISION)
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks_ptr + head * G + g, mask=in_group, other=0.0).to(tl.float32)
            mass += tl.exp2(sink * 1.4426950408889634 - peak)
        out_at = row * out_stride + (head * G + g[:, None]) * D + d[None, :]
        result = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, result, mask=in_group[:, None] & in_head[None, :])
    else:
        part = (row * H + head * G + g) * SPLITS + split
        tl.store(peak_ptr + part, peak, mask=in_group)
        tl.store(mass_ptr + part, mass, mask=in_group)
        tl.store(part_ptr + part[:, None] * D + d[None, :], total, mask=in_group[:, None] & in_head[None, :])


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
def ordered_attend_kernel(
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, table_ptr, position_ptr, anchor_ptr, offset_ptr, sinks_ptr, out_ptr,
    layer, table_stride, query_head_stride, query_row_stride, key_head_stride, key_row_stride, value_head_stride,
    value_row_stride, out_stride, factor, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr, ONES: tl.constexpr,
    WINDOWED: tl.constexpr, SUNK: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Compute attention of one row's query heads of one key head, page by page, as models.ordered_attention does; write the new
    key and value to the last page.
    """
    await_input()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = H // K
    position = tl.load(position_ptr + row)
    g, d, j = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, P)
    in_group = g < G
    query_at = (head * G + g[:, None]) * query_head_stride + row * query_row_stride
    query = _head_of(
        query_ptr, query_at, d[None, :], in_group[:, None] & (d < D)[None, :], query_ptr, cos_ptr, sin_ptr, position, 0.0,
        0.0, 1, D, False, False, HALF, INTERLEAVED,
    )  # fmt: skip
    key_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer), 16) + head * (P * D)
    value_base = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer + 1), 16) + head * (P * D)
    key_at, value_at = j[None, :] * D + d[:, None], j[:, None] * D + d[None, :]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS, ONES], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    ones = tl.full([P, ONES], 1.0, out_ptr.dtype.element_ty)
    place, in_head = position % P, d < D
    page = tl.load(table_ptr + row * table_stride + position // P).to(tl.int64)
    last_keys, last_values = key_base + page * (K * P * D), value_base + page * (K * P * D)
    new_key = _head_of(
        key_ptr + head * key_head_stride + row * key_row_stride, 0, d, in_head, key_ptr, cos_ptr, sin_ptr, position, 0.0, 0.0,
        0, D, False, False, HALF, INTERLEAVED,
    ).to(key_base.dtype.element_ty)  # fmt: skip
    value_ptr += head * value_head_stride + row * value_row_stride
    new_value = tl.load(value_ptr + d).to(value_base.dtype.element_ty)
    tl.store(last_keys + place * D + d, new_key)
    tl.store(last_values + place * D + d, new_value)
    first = tl.maximum(position + 1 - window, 0) // P if WINDOWED else 0
    for block in range(first, position // P):
        at = tl.load(table_ptr + row * table_stride + block).to(tl.int64) * (K * P * D)
        key, value = tl.load(key_base + at + key_at), tl.load(value_base + at + value_at)
        seen = block * P + j > position - window
        peak, mass, total = add_block(
            query, peak, mass, total, key, value, seen[None, :], ones, factor, WINDOWED, WINDOWED
        )
    key = _with_new(last_keys, new_key, 1, place, in_head, D, D, P)
    seen = j <= place
    if WINDOWED:
        seen &= position // P * P + j > position - window
    peak, prob, shrink = weights_of(query, peak, key, seen[None, :], factor, True, WINDOWED)
    value = _with_new(last_values, new_value, 0, place, in_head, D, D, P)
    mass, total = add_values(mass, total, prob, shrink, value, ones)
    out_at = row * out_stride + (head * G + g[:, None]) * D + d[None, :]
    sink = tl.load(sinks_ptr + head * G + g, mask=in_group, other=0.0) if SUNK else 0.0
    weight = weight_of(peak, mass, sink, factor, SUNK)
    result = (total / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, result, mask=in_group[:, None])
