"""Gradients of ordered_attention over a packed stream (Triton), in one fixed order, for prompts that several sequences share.

Two kernels compute the probabilities again from the log-sum-exps, as FlashAttention's backward pass does (Dao et al., arXiv
2205.14135, algorithm 4): one for each tile of queries, which adds over its keys, and one for each block of keys, which adds over
the queries that see it. Where many do, as with a shared prompt's keys, several programs add over a part of them each, and a third
kernel adds the parts in order.

Legend: T tokens of the stream, H query heads, K key/value heads, D head size.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.ordered import BLOCK, FIELDS, QUERIES, TASK, Tasks
from lockstep.models.ordered_attention import LOG2_E, tile_at

ROWS = 64
"""Queries that a block of keys meets at a time."""


@triton.jit
def _queries_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, out_ptr, lse_ptr, delta_ptr, grad_query_ptr, tiles_ptr, scale, factor,
    tokens, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of queries of one head, and the row terms grad · output that both kernels need."""
    tile, head = tl.program_id(0), tl.program_id(1)
    start, count, position, end0, end1, shift0, shift1, shift2 = tile_at(tiles_ptr + tile * FIELDS)
    i, j, d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, D)
    own = (start + i)[:, None] * (H * D) + head * D + d[None, :]
    live = (i < count)[:, None]
    query = tl.load(query_ptr + own, mask=live, other=0.0)
    grad = tl.load(grad_ptr + own, mask=live, other=0.0)
    out = tl.load(out_ptr + own, mask=live, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    row = head * tokens + start + i
    tl.store(delta_ptr + row, delta, mask=i < count)
    lse = tl.load(lse_ptr + row, mask=i < count, other=float("inf")) * 1.4426950408889634
    kv = (head // (H // K)) * D
    total = tl.zeros([QUERIES, D], tl.float32)
    keys = position + count
    full = (position + 1) // KEYS  # blocks that every query of the tile sees as a whole
    for block in range(0, full):
        index = block * KEYS + j
        place = index + tl.where(index < end0, shift0, tl.where(index < end1, shift1, shift2))
        key = tl.load(key_ptr + place[:, None] * (K * D) + kv + d[None, :])
        value = tl.load(value_ptr + place[:, None] * (K * D) + kv + d[None, :])
        prob = tl.exp2(tl.dot(query, tl.trans(key)) * factor - lse[:, None])
        slope = prob * (tl.dot(grad, tl.trans(value)) - delta[:, None])
        total = tl.dot(slope.to(key.dtype), key, total)
    for block in range(full, tl.cdiv(keys, KEYS)):
        index = block * KEYS + j
        place = index + tl.where(index < end0, shift0, tl.where(index < end1, shift1, shift2))
        there = (index < keys)[:, None]
        key = tl.load(key_ptr + place[:, None] * (K * D) + kv + d[None, :], mask=there, other=0.0)
        value = tl.load(value_ptr + place[:, None] * (K * D) + kv + d[None, :], mask=there, other=0.0)
        score = tl.dot(query, tl.trans(key)) * factor - lse[:, None]
        prob = tl.exp2(tl.where(index[None, :] <= (position + i)[:, None], score, -float("inf")))
        slope = prob * (tl.dot(grad, tl.trans(value)) - delta[:, None])
        total = tl.dot(slope.to(key.dtype), key, total)
    tl.store(grad_query_ptr + own, (total * scale).to(grad_query_ptr.dtype.element_ty), mask=live)


@triton.jit
def _keys_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, lse_ptr, delta_ptr, grad_key_ptr, grad_value_ptr, sums_ptr, tasks_ptr,
    scale, factor, tokens, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TASK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one block of keys and values over some of the queries that see it, of all heads that share them."""
    at = tasks_ptr + tl.program_id(0) * TASK
    start, count, first, last, slot = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    kv = tl.program_id(1)
    GROUP: tl.constexpr = H // K
    j, i, d = tl.arange(0, KEYS), tl.arange(0, ROWS), tl.arange(0, D)
    own = (start + j)[:, None] * (K * D) + kv * D + d[None, :]
    live = (j < count)[:, None]
    key = tl.load(key_ptr + own, mask=live, other=0.0)
    value = tl.load(value_ptr + own, mask=live, other=0.0)
    grad_key = tl.zeros([KEYS, D], tl.float32)
    grad_value = tl.zeros([KEYS, D], tl.float32)
    steps = tl.cdiv(last - first, ROWS)
    for step in range(0, steps * GROUP):
        head = kv * GROUP + step // steps
        row = first + (step % steps) * ROWS + i
        there = row < last
        given = row[:, None] * (H * D) + head * D + d[None, :]
        query = tl.load(query_ptr + given, mask=there[:, None], other=0.0)
        grad = tl.load(grad_ptr + given, mask=there[:, None], other=0.0)
        lse = tl.load(lse_ptr + head * tokens + row, mask=there, other=float("inf")) * 1.4426950408889634
        delta = tl.load(delta_ptr + head * tokens + row, mask=there, other=0.0)
        score = tl.dot(key, tl.trans(query)) * factor - lse[None, :]
        # a query behind a key in the stream sees it: within a piece by causality, in a later piece because it continues this one
        prob = tl.exp2(tl.where((start + j)[:, None] <= row[None, :], score, -float("inf")))
        grad_value = tl.dot(prob.to(grad.dtype), grad, grad_value)
        slope = prob * (tl.dot(value, tl.trans(grad)) - delta[None, :])
        grad_key = tl.dot(slope.to(query.dtype), query, grad_key)
    grad_key *= scale
    if slot < 0:
        tl.store(grad_key_ptr + own, grad_key.to(grad_key_ptr.dtype.element_ty), mask=live)
        tl.store(grad_value_ptr + own, grad_value.to(grad_value_ptr.dtype.element_ty), mask=live)
    else:
        place = sums_ptr + ((slot.to(tl.int64) * 2 * K + kv) * KEYS + j)[:, None] * D + d[None, :]
        tl.store(place, grad_key)
        tl.store(place + K * KEYS * D, grad_value)


@triton.jit
def _add_kernel(
    sums_ptr, grad_key_ptr, grad_value_ptr, shared_ptr, K: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Add the parts of one block of keys in order."""
    at = shared_ptr + tl.program_id(0) * 4
    start, count, slot, slots = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    kv = tl.program_id(1)
    j, d = tl.arange(0, KEYS), tl.arange(0, D)
    grad_key = tl.zeros([KEYS, D], tl.float32)
    grad_value = tl.zeros([KEYS, D], tl.float32)
    place = sums_ptr + ((slot.to(tl.int64) * 2 * K + kv) * KEYS + j)[:, None] * D + d[None, :]
    for _ in range(0, slots):
        grad_key += tl.load(place)
        grad_value += tl.load(place + K * KEYS * D)
        place += 2 * K * KEYS * D
    own = (start + j)[:, None] * (K * D) + kv * D + d[None, :]
    live = (j < count)[:, None]
    tl.store(grad_key_ptr + own, grad_key.to(grad_key_ptr.dtype.element_ty), mask=live)
    tl.store(grad_value_ptr + own, grad_value.to(grad_value_ptr.dtype.element_ty), mask=live)


def stream_gradients(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    output_THD: Tensor,
    lse_HT: Tensor,
    tiles: Tensor,
    tasks: Tasks,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given those of the output and what the forward pass returned.

    `tiles` and `tasks` are of the same pieces, which cover the stream; all tensors are contiguous. No windows.
    """
    (tokens, heads, size), kv_heads = query_THD.shape, key_TKD.shape[1]
    grads = torch.empty_like(query_THD), torch.empty_like(key_TKD), torch.empty_like(value_TKD)
    delta_HT = torch.empty_like(lse_HT)
    sums = lse_HT.new_empty(max(1, tasks.slots), 2, kv_heads, BLOCK, size)
    shape = heads, kv_heads, size
    _queries_kernel[(len(tiles), heads)](
        query_THD, key_TKD, value_TKD, grad_THD, output_THD, lse_HT, delta_HT, grads[0], tiles, scale, scale * LOG2_E,
        tokens, *shape, QUERIES, BLOCK, FIELDS, num_warps=8, num_stages=3,
    )  # fmt: skip
    _keys_kernel[(len(tasks.tasks), kv_heads)](
        query_THD, key_TKD, value_TKD, grad_THD, lse_HT, delta_HT, *grads[1:], sums, tasks.tasks, scale, scale * LOG2_E,
        tokens, *shape, ROWS, BLOCK, TASK, num_warps=4, num_stages=2,
    )  # fmt: skip
    if len(tasks.shared):
        _add_kernel[(len(tasks.shared), kv_heads)](sums, *grads[1:], tasks.shared, kv_heads, size, BLOCK, num_warps=4)
    return grads
