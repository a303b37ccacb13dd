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
def gate_kernel(x_ptr, out_ptr, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """Compute silu(first half) × second half of each row, or with gelu in its approximation by tanh."""
    await_input()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < SIZE
    gate = tl.load(x_ptr + row * 2 * SIZE + at, mask=ok, other=0.0)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + at, mask=ok, other=0.0)
    value, _ = activation(gate.to(tl.float32), TANH)
    tl.store(out_ptr + row * out_stride + at, value.to(gate.dtype) * up, mask=ok)


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
