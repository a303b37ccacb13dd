"""Causal attention with sinks, soft caps or windows, in blocks of queries: never a matrix of all queries and all keys.

Each block sees all of its keys at once, so its softmax is complete and no partial results are merged; a window leaves out keys
that none of the block's queries sees. For the backward pass the inputs and one log-sum-exp for each query and head are kept;
scores are computed again.

Legend: N rows, H query heads, K key/value heads, G = H / K, Q queries, S keys, D size of a key, Dv of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PAIRS = 2**16
"""Queries × keys of a block, all rows together, at most; but at least LEAST queries."""
LEAST = 16


def blockwise_attention(
    query_NHQD: Tensor,
    key_NKSD: Tensor,
    value_NKSV: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute attention [N, H, Q, Dv], the last query at the last key. Settings as in models.attention.AttentionKind."""
    output: Tensor = _Blockwise.apply(query_NHQD, key_NKSD, value_NKSV, sinks_H, scale, window, softcap)  # type: ignore[no-untyped-call]
    return output


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        lse_NHQ = query.new_empty(query.shape[:3], dtype=_wide(query.dtype))
        sinks = None if sinks_H is None else sinks_H.detach().to(lse_NHQ.dtype)[None, :, None]
        for rows, keys in _blocks(query, key, window):
            scores, _ = _scores(query, key, rows, keys, scale, window, softcap)
            lse = scores.logsumexp(-1)
            lse = lse if sinks is None else torch.logaddexp(lse, sinks)
            probs = scores.sub_(lse[..., None]).exp_().to(query.dtype)
            output[:, :, rows] = _times(probs, value[:, :, keys])
            lse_NHQ[:, :, rows] = lse
        ctx.save_for_backward(query, key, value, sinks_H, lse_NHQ)
        ctx.settings = scale, window, softcap
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, sinks_H, lse_NHQ = ctx.saved_tensors
        scale, window, softcap = ctx.settings
        wide = lse_NHQ.dtype
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        shared_NHQ = torch.empty_like(lse_NHQ)
        for rows, keys in _blocks(query, key, window):
            scores, bent = _scores(query, key, rows, keys, scale, window, softcap)
            probs = scores.sub_(lse_NHQ[:, :, rows, None]).exp_()
            grad_value[:, :, keys] += _summed(probs, grad[:, :, rows].to(wide), key.shape[1])
            change = _times(grad[:, :, rows].to(wide), value[:, :, keys].to(wide).transpose(-1, -2))
            shared_NHQ[:, :, rows] = torch.einsum("nhqs,nhqs->nhq", probs, change)
            change = change.sub_(shared_NHQ[:, :, rows, None]).mul_(probs)
            if bent is not None:  # the derivative of softcap · tanh
                change = change.mul_(bent.square_().neg_().add_(1))
            change = change.mul_(scale)
            grad_query[:, :, rows] = _times(change, key[:, :, keys].to(wide)).to(query.dtype)
            grad_key[:, :, keys] += _summed(change, query[:, :, rows].to(wide), key.shape[1])
        grad_sinks = None
        if sinks_H is not None:
            share_NHQ = (sinks_H.to(wide)[None, :, None] - lse_NHQ).exp()
            grad_sinks = -(share_NHQ * shared_NHQ).sum((0, 2)).to(sinks_H.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _blocks(query: Tensor, key: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield queries, and the keys that one of them sees."""
    rows, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    size = max(LEAST, PAIRS // (rows * min(keys, (window or keys) + LEAST)))
    for start in range(0, queries, size):
        end = min(start + size, queries)
        first = 0 if window is None else max(0, keys - queries + start - window + 1)
        yield slice(start, end), slice(first, keys - queries + end)


def _scores(
    query: Tensor, key: Tensor, rows: slice, keys: slice, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return a block's scores [N, H, q, s], -inf where a query does not look, and the tanh that capped them."""
    scores = _times(query[:, :, rows], key[:, :, keys].transpose(-1, -2))
    scores = scores.to(_wide(scores.dtype)) * scale
    bent = None
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores = softcap * bent
    at_q = torch.arange(rows.start, rows.stop, device=key.device)[:, None] + key.shape[2] - query.shape[2]
    at_s = torch.arange(keys.start, keys.stop, device=key.device)
    hidden = at_s > at_q if window is None else (at_s > at_q) | (at_s <= at_q - window)
    return scores.masked_fill_(hidden, -torch.inf), bent


def _times(left_NHxy: Tensor, right_NKyz: Tensor) -> Tensor:
    """Multiply each of the G query heads of a key head with it, without a copy of it for each."""
    count, heads, x, y = left_NHxy.shape
    kv_heads = right_NKyz.shape[1]
    stacked = left_NHxy.reshape(count, kv_heads, heads // kv_heads * x, y) @ right_NKyz
    return stacked.view(count, heads, x, right_NKyz.shape[-1])


def _summed(left_NHqs: Tensor, right_NHqd: Tensor, kv_heads: int) -> Tensor:
    """Return the products leftᵀ right of a key head's query heads, added up: [N, K, s, d]."""
    count, heads = left_NHqs.shape[:2]
    shape = count, kv_heads, heads // kv_heads * left_NHqs.shape[2]
    return left_NHqs.reshape(*shape, -1).transpose(-1, -2) @ right_NHqd.reshape(*shape, -1)
