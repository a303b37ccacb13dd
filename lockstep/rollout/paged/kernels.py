"""Triton kernels of one decode step. Each has a plain torch equivalent in `plain.py`, which runs on a CPU and defines the
result.

Legend: B rows, H query heads, K key/value heads, D head size, P tokens of a page, V vocabulary, X features.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.models.layer_kernels import activation
from lockstep.models.overlap import await_input


@triton.jit
def gate_kernel(x_ptr, out_ptr, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(first half) × second half of each row."""
    await_input()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < SIZE
    gate = tl.load(x_ptr + row * 2 * SIZE + at, mask=ok, other=0.0)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + at, mask=ok, other=0.0)
    value, _ = activation(gate.to(tl.float32), False)
    tl.store(out_ptr + row * out_stride + at, value.to(gate.dtype) * up, mask=ok)


@triton.jit
def rope_append_kernel(
    qkv_ptr,
    query_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    table_ptr,
    anchor_ptr,
    offset_ptr,
    query_norm_ptr,
    key_norm_ptr,
    layer,
    table_stride,
    eps,
    NORM: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
):
    """Norm and rotate queries and keys of all heads of one row; write keys and values to the cache."""
    await_input()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row)
    page = tl.load(table_ptr + row * table_stride + position // P).to(tl.int64)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    ok = (head < H + 2 * K) & (at < D // 2)
    source = qkv_ptr + row * ((H + 2 * K) * D) + head * D + at
    low = tl.load(source, mask=ok, other=0.0)
    high = tl.load(source + D // 2, mask=ok, other=0.0)
    is_query, is_value = head < H, head >= H + K
    cos = tl.load(cos_ptr + position.to(tl.int64) * (D // 2) + at, mask=at < D // 2, other=0.0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * (D // 2) + at, mask=at < D // 2, other=0.0)
    normed_low, normed_high = low, high
    if NORM:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide_low * wide_low + wide_high * wide_high, 1) / D + eps)[:, None]
        query_low = tl.load(query_norm_ptr + at, mask=at < D // 2, other=0.0)
        query_high = tl.load(query_norm_ptr + D // 2 + at, mask=at < D // 2, other=0.0)
        key_low = tl.load(key_norm_ptr + at, mask=at < D // 2, other=0.0)
        key_high = tl.load(key_norm_ptr + D // 2 + at, mask=at < D // 2, other=0.0)
        normed_low = (wide_low * scale).to(low.dtype) * tl.where(is_query, query_low, key_low)
        normed_high = (wide_high * scale).to(high.dtype) * tl.where(is_query, query_high, key_high)
    wide_low, wide_high = normed_low.to(tl.float32), normed_high.to(tl.float32)
    turned_low = (wide_low * cos).to(low.dtype).to(tl.float32) - (wide_high * sin).to(low.dtype).to(tl.float32)
    turned_high = (wide_high * cos).to(low.dtype).to(tl.float32) + (wide_low * sin).to(low.dtype).to(tl.float32)
    turned_low = tl.where(is_value, low, turned_low.to(low.dtype))
    turned_high = tl.where(is_value, high, turned_high.to(high.dtype))
    query = query_ptr + row * (H * D) + head * D + at
    tl.store(query, turned_low, mask=ok & is_query)
    tl.store(query + D // 2, turned_high, mask=ok & is_query)
    distance = tl.load(offset_ptr + 2 * layer + is_value.to(tl.int32))
    kv_head = tl.where(is_value, head - H - K, head - H)
    place = anchor_ptr + distance + (page * K + kv_head) * (P * D) + (position % P) * D + at
    tl.store(place, turned_low, mask=ok & (head >= H))
    tl.store(place + D // 2, turned_high, mask=ok & (head >= H))


@triton.jit
def append_kernel(
    key_ptr,
    value_ptr,
    position_ptr,
    table_ptr,
    anchor_ptr,
    offset_ptr,
    layer,
    table_stride,
    key_head_stride,
    key_row_stride,
    value_head_stride,
    value_row_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
):
    """Write one key and one value head of one row to the cache."""
    await_input()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(position_ptr + row)
    page = tl.load(table_ptr + row * table_stride + position // P).to(tl.int64)
    place = (page * K + head) * (P * D) + (position % P) * D
    at = tl.arange(0, BLOCK)
    ok = at < D
    keys = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer), 16)
    values = anchor_ptr + tl.multiple_of(tl.load(offset_ptr + 2 * layer + 1), 16)
    key = tl.load(key_ptr + head * key_head_stride + row * key_row_stride + at, mask=ok)
    value = tl.load(value_ptr + head * value_head_stride + row * value_row_stride + at, mask=ok)
    tl.store(keys + place + at, key, mask=ok)
    tl.store(values + place + at, value, mask=ok)


@triton.jit
def _mix(x):
    """Run one round of splitmix64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    drawn_ptr,
    peak_ptr,
    mass_ptr,
    best_ptr,
    token_ptr,
    logprob_ptr,
    V,
    CHUNKS,
    BLOCK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Invert the cumulative distribution of one row at its own random number: the chunk first, then within it."""
    await_input()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    c = tl.arange(0, BLOCK_CHUNKS)
    ok = c < CHUNKS
    peaks = tl.load(peak_ptr + row * CHUNKS + c, mask=ok, other=-float("inf"))
    peak = tl.max(peaks, 0)
    masses = tl.load(mass_ptr + row * CHUNKS + c, mask=ok, other=0.0) * tl.exp(peaks - peak)
    cumulative = tl.cumsum(masses.to(tl.float64), 0)
    total = tl.max(cumulative, 0)
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    counter = tl.load(drawn_ptr + row).to(tl.uint64)
    bits = _mix(_mix(seed + counter * 0x9E3779B97F4A7C15))
    goal = (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0) * total
    chunk = tl.minimum(tl.sum(((cumulative <= goal) & ok).to(tl.int32), 0), CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, masses, 0.0).to(tl.float64), 0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * V + at, mask=at < V, other=-float("inf")).to(tl.float32)
    logits = logits / tl.where(temperature > 0, temperature, 1.0)
    mass = tl.exp(logits - peak)
    inside = tl.cumsum(mass, 0)
    offset = tl.sum((inside <= (goal - before).to(tl.float32)).to(tl.int32), 0)
    # Rounding can carry the target past the chunk's end: take its last token with nonzero probability.
    last = tl.max(tl.where(mass > 0, tl.arange(0, BLOCK), 0), 0)
    offset = tl.minimum(offset, last)
    chosen = tl.max(tl.where(tl.arange(0, BLOCK) == offset, logits, -float("inf")), 0)
    token = chunk * BLOCK + offset
    if temperature == 0:
        greedy = tl.argmax(peaks, 0)
        token = tl.load(best_ptr + row * CHUNKS + greedy)
        chosen = peak
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, chosen - peak - tl.log(total.to(tl.float32)))


@triton.jit
def advance_kernel(
    token_ptr,
    logprob_ptr,
    next_ptr,
    position_ptr,
    drawn_ptr,
    budget_ptr,
    ignore_ptr,
    done_ptr,
    ids_ptr,
    logprobs_ptr,
    stops_ptr,
    STOPS,
    WIDTH,
    BLOCK: tl.constexpr,
):
    """Store the drawn token of one row that still runs, and check whether it ends there."""
    await_input()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done_ptr + row) == 0:
        token, drawn = tl.load(token_ptr + row), tl.load(drawn_ptr + row)
        tl.store(ids_ptr + row * WIDTH + drawn, token.to(tl.int32))
        tl.store(logprobs_ptr + row * WIDTH + drawn, tl.load(logprob_ptr + row))
        tl.store(next_ptr + row, token)
        tl.store(position_ptr + row, tl.load(position_ptr + row) + 1)
        tl.store(drawn_ptr + row, drawn + 1)
        s = tl.arange(0, BLOCK)
        stops = tl.load(stops_ptr + s, mask=s < STOPS, other=-1)
        stopped = (tl.max((stops == token).to(tl.int32), 0) > 0) & (tl.load(ignore_ptr + row) == 0)
        tl.store(done_ptr + row, (stopped | (drawn + 1 >= tl.load(budget_ptr + row))).to(tl.int8))
