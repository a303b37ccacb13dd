"""What a flash-attention kernel computes, segment by segment in plain torch, in the precision of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.learner.flash import Kernels, Part


def segments(part: Part) -> Iterator[tuple[slice, slice]]:
    queries, keys = part.query_spans.bounds.tolist(), part.key_spans.bounds.tolist()
    for i in range(len(queries) - 1):
        yield slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])


def scores_of(query: Tensor, key: Tensor, part: Part, scale: float) -> Tensor:
    """[H, Q, S] of one segment; minus infinity where nothing is seen."""
    wide = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("qhd,shd->hqs", query, wide) * scale
    if part.causal:
        count, keys = scores.shape[1:]
        seen = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
        seen = seen if part.window is None else seen.triu(keys - count - part.window + 1)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def forward(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    output = torch.full_like(query, torch.nan)  # as a kernel leaves what no segment covers
    lse = query.new_full((query.shape[1], query.shape[0]), torch.nan)
    for rows, keys in segments(part):
        scores = scores_of(query[rows], key[keys], part, scale)
        wide = value[keys].repeat_interleave(query.shape[1] // key.shape[1], 1)
        output[rows] = torch.einsum("hqs,shd->qhd", scores.softmax(-1), wide)
        lse[:, rows] = scores.logsumexp(-1)
    return output, lse


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention 2 (Dao, arXiv 2307.08691), algorithm 2: probabilities from the log-sum-exp that is given."""
    assert lse.is_contiguous(), "kernels read it by address"
    heads, kv_heads = query.shape[1], key.shape[1]
    grads = tuple(torch.full_like(x, torch.nan) for x in (query, key, value))
    for rows, keys in segments(part):
        probs = (scores_of(query[rows], key[keys], part, scale) - lse[:, rows, None]).exp()
        wide_key, wide_value = (x[keys].repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        row_term = (grad[rows] * output[rows]).sum(-1).T[..., None]
        by_score = probs * (torch.einsum("qhd,shd->hqs", grad[rows], wide_value) - row_term) * scale
        grads[0][rows] = torch.einsum("hqs,shd->qhd", by_score, wide_key)
        for place, weights, other in ((1, by_score, query), (2, probs, grad)):
            each = torch.einsum("hqs,qhd->shd", weights, other[rows])
            grads[place][keys] = each.unflatten(1, (kv_heads, heads // kv_heads)).sum(2)
    return grads


REFERENCE = Kernels(lambda query: True, forward, backward)
