"""Attention over a packed stream, with flash-attention kernels for packed segments: no padding, no mask, no loop.

Every segment of the stream (root, prompt, response, padding) attends to itself causally, all of them in one call. A segment
attends to all tokens of those that it continues: a group's responses, as one block of queries, to their prompt, and every
segment to the root. The parts are merged by their log-sum-exps, which equals the softmax over their union. In the backward pass
a probability of the union is exp(score - merged log-sum-exp) and the row term is grad · merged output, so each part's kernel
gives its own share of the gradients when it receives those two (ring attention uses the same identity: Liu et al., arXiv
2310.01889). A sink is one more part: a key of its head's score whose value is zero.

In a layer with a sliding window, each token of a segment may see another part of the tokens before the segment. So a segment
has keys of its own: copies of the last tokens before it, then its own tokens. All segments are in one call.

Legend: T tokens of the stream, Q queries and S keys of a part, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.device import since_hopper
from lockstep.models.host import on_device
from lockstep.models.ordered import Piece, Tasks, Tiles
from lockstep.models.varlen import Spans, flash_backward, flash_forward, flash_serves

ORDERED_SIZES = (64, 128)
"""Sizes of heads that the kernels of models.ordered_gradients are made for."""
SINK_ROWS = 2048
"""Queries of which the gradient of sinks is summed at once."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows of a stream [T], all of them and some several times [S]."""

    rows_S: Tensor
    places_S: Tensor
    """Places at which the stream's first row stands, in order, then its second, and so on."""
    starts_T: Tensor
    """Index of each row's first among those."""

    @staticmethod
    def of(rows_S: np.ndarray[Any, Any], tokens: int, device: torch.device) -> Copies:
        starts = np.cumsum(np.bincount(rows_S, minlength=tokens)) - np.bincount(rows_S, minlength=tokens)
        places = np.argsort(rows_S, kind="stable")
        return Copies(*(on_device(array.astype(np.int64), device) for array in (rows_S, places, starts)))

    def summed(self, grad_SKD: Tensor) -> Tensor:
        """Return the sums of each row's copies, [T, K, D]. A GPU adds halves in fp32; the order is fixed."""
        sums = F.embedding_bag(self.places_S, grad_SKD.flatten(1), self.starts_T, mode="sum")
        summed_TKD: Tensor = sums.unflatten(1, grad_SKD.shape[1:])
        return summed_TKD


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel call: the i-th segment of a range of queries attends to the i-th segment of a range of keys."""

    queries: slice
    keys: slice
    query_spans: Spans
    """The segments, relative to the range."""
    key_spans: Spans
    causal: bool
    """True if the last query of a segment is at its last key, and each sees what is before it."""
    window: int | None = None
    """Largest number of keys that a query of a causal part sees."""
    copies: Copies | None = None
    """Rows of the range that are the keys, if some are keys of several segments."""

    @staticmethod
    def of(
        queries: slice, keys: slice, query_lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device
    ) -> Part:
        """Return segments of queries that attend to all of their segments of keys."""
        return Part(queries, keys, Spans.of(query_lengths, device), Spans.of(key_lengths, device), causal=False)

    @staticmethod
    def itself(lengths: Sequence[int], device: torch.device) -> Part:
        """Return a stream of segments that attend to themselves causally."""
        whole, spans = slice(0, sum(lengths)), Spans.of(lengths, device)
        return Part(whole, whole, spans, spans, causal=True)

    @staticmethod
    def windowed(pieces: Sequence[Piece], window: int, device: torch.device) -> Part:
        """Return a stream of pieces of sequences whose tokens each see `window` tokens of their sequence, themselves included."""
        rows: list[np.ndarray[Any, Any]] = []
        queries: list[int] = []
        keys: list[int] = []
        for piece in sorted((piece for piece in pieces if piece.tokens), key=lambda piece: piece.start):
            ends = [0, *(end for end, _ in piece.before)]
            stretches = zip(pairwise(ends), piece.before, strict=True)
            seen = np.concatenate([np.arange(0), *(np.arange(at, at + b - a) for (a, b), (_, at) in stretches)])
            if len(seen) and seen[-1] == piece.start - 1:  # behind what it continues: one segment with it
                seen = seen[:0]
                queries[-1] += piece.tokens
                keys[-1] += piece.tokens
            else:
                seen = seen[max(0, len(seen) - window + 1) :]
                queries.append(piece.tokens)
                keys.append(len(seen) + piece.tokens)
            rows += seen, np.arange(piece.start, piece.start + piece.tokens)
        tokens, rows_S = sum(queries), np.concatenate(rows)
        copies = Copies.of(rows_S, tokens, device) if len(rows_S) > tokens else None
        whole, spans = slice(0, tokens), (Spans.of(queries, device), Spans.of(keys, device))
        return Part(whole, whole, *spans, causal=True, window=window, copies=copies)

    def keys_of(self, stream_TKD: Tensor) -> Tensor:
        """Return what the part's keys are of the stream, or their values."""
        rows = stream_TKD[self.keys]
        return rows if self.copies is None else rows.index_select(0, self.copies.rows_S)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Functions that compute a part. Log-sum-exps are fp32 [H, Q], of the scaled scores."""

    serves: Callable[[Tensor], bool]
    """Returns True if the kernels can compute queries like these."""
    forward: Callable[[Tensor, Tensor, Tensor, Part, float], tuple[Tensor, Tensor]]
    """Maps query_QHD, key_SKD, value_SKD, part, scale → output_QHD, lse_HQ"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Part, float], tuple[Tensor, Tensor, Tensor]]
    """Maps grad_QHD, query_QHD, key_SKD, value_SKD, output_QHD, lse_HQ, part, scale → gradients of query, key and value. Output
    and log-sum-exp may be those of a softmax over more keys than the part's.
    """
    ordered: Callable[[Tensor], bool] = lambda query_THD: False
    """Returns True if the backward pass over whole queries and keys is that of models.ordered_gradients."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """A stream's work for kernels in one order."""

    tiles: Tiles
    tasks: Tasks | None
    """Work of the backward pass; None leaves it to the parts' kernels."""
    forward: bool
    """True if the forward pass is in order, too."""


def flash_attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    parts: Sequence[Part],
    scale: float,
    kernels: Kernels,
    ordered: Ordered | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute attention [T, H, D] over the union of the parts, the first of which covers the stream; differentiable once.

    `sinks_H` are scores that take part in each softmax and carry no value. `ordered` says which passes are those of
    models.ordered_attention and models.ordered_gradients, in place of the parts' kernels.
    """
    function: Any = _FlashAttention
    output_THD: Tensor = function.apply(query_THD, key_TKD, value_TKD, sinks_H, tuple(parts), scale, kernels, ordered)
    return output_THD


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        sinks_H: Tensor | None,
        parts: tuple[Part, ...],
        scale: float,
        kernels: Kernels,
        ordered: Ordered | None,
    ) -> Tensor:
        tiles = ordered.tiles if ordered is not None and ordered.forward else None
        if tiles is None:
            first = parts[0]
            output_THD, lse_HT = kernels.forward(
                query_THD, first.keys_of(key_TKD), first.keys_of(value_TKD), first, scale
            )
        else:
            from lockstep.models.ordered_attention import stream_attention  # Triton

            given = query_THD, key_TKD, value_TKD, tiles, scale, parts[0].window, sinks_H
            output_THD, lse_HT = stream_attention(*given)
        for part in parts[1:] if tiles is None else ():
            more = kernels.forward(query_THD[part.queries], part.keys_of(key_TKD), part.keys_of(value_TKD), part, scale)
            merge_(output_THD[part.queries], lse_HT[:, part.queries], *more)
        if sinks_H is not None and tiles is None:
            sinks_HT = sinks_H.detach().to(lse_HT.dtype)[:, None].expand_as(lse_HT).contiguous()
            merge_(output_THD, lse_HT, torch.zeros_like(output_THD[:1]).expand_as(output_THD), sinks_HT)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, sinks_H, output_THD, lse_HT)
        ctx.parts, ctx.scale, ctx.kernels, ctx.ordered = parts, scale, kernels, ordered
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_THD,) = grads
        query_THD, key_TKD, value_TKD, sinks_H, output_THD, lse_HT = ctx.saved_tensors
        grad_sinks = _sinks_gradient(grad_THD, output_THD, lse_HT, sinks_H) if ctx.needs_input_grad[3] else None

        def share(part: Part) -> tuple[Tensor, Tensor, Tensor]:
            rows = part.queries
            query, key, value = ctx.kernels.backward(
                grad_THD[rows],
                query_THD[rows],
                part.keys_of(key_TKD),
                part.keys_of(value_TKD),
                output_THD[rows],
                lse_HT[:, rows].contiguous(),  # the kernels read it by address, without strides
                part,
                ctx.scale,
            )
            return (query, key, value) if part.copies is None else (query, *map(part.copies.summed, (key, value)))

        if ctx.ordered is not None and ctx.ordered.tasks is not None:
            from lockstep.models.ordered_gradients import stream_gradients  # Triton

            work = ctx.ordered.tiles.table, ctx.ordered.tasks
            given = query_THD, key_TKD, value_TKD, output_THD, lse_HT, *work, ctx.scale
            return *stream_gradients(grad_THD.contiguous(), *given), grad_sinks, None, None, None, None
        grad_query, grad_key, grad_value = share(ctx.parts[0])
        for part in ctx.parts[1:]:
            more_query, more_key, more_value = share(part)
            grad_query[part.queries] += more_query
            grad_key[part.keys] += more_key
            grad_value[part.keys] += more_value
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None, None


def _sinks_gradient(grad_THD: Tensor, output_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return -Σ probability of the sink · (grad · output), given the log-sum-exps that include it; block by block of queries."""
    wide_H = sinks_H.to(lse_HT.dtype)
    total_H = torch.zeros_like(wide_H)
    blocks = (x.split(SINK_ROWS, dim) for x, dim in ((grad_THD, 0), (output_THD, 0), (lse_HT, 1)))
    for grad_QHD, output_QHD, lse_HQ in zip(*blocks, strict=True):
        dot_HQ = (grad_QHD.to(lse_HQ.dtype) * output_QHD).sum(-1).T
        total_H -= ((wide_H[:, None] - lse_HQ).exp() * dot_HQ).sum(1)
    return total_H.to(sinks_H.dtype)


def merge_(output_QHD: Tensor, lse_HQ: Tensor, more_QHD: Tensor, more_lse_HQ: Tensor) -> None:
    """Include further keys in a softmax-weighted mean and its log-sum-exp, in place."""
    kernel = _merge_kernel() if output_QHD.is_cuda else None
    if kernel is not None:
        kernel(output_QHD, lse_HQ, more_QHD, more_lse_HQ)
        return
    total_HQ = torch.logaddexp(lse_HQ, more_lse_HQ)
    kept_QH1, added_QH1 = ((one_HQ - total_HQ).exp().T[..., None] for one_HQ in (lse_HQ, more_lse_HQ))
    output_QHD.copy_(output_QHD * kept_QH1 + more_QHD * added_QH1)
    lse_HQ.copy_(total_HQ)


@cache
def _merge_kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    try:
        from lockstep.learner.merge_kernel import merge_by_kernel_
    except ImportError:  # no Triton: several passes over the output instead of one
        return None
    return merge_by_kernel_


# --- torch's own kernels --------------------------------------------------------------------------------------------
def _spans(part: Part) -> tuple[Spans, Spans]:
    # With one query per segment, torch's kernel builds blocks from a key head's query heads and then treats every segment as
    # long: a wrong shape if some are empty, and log-sum-exps in another order. A bound of 2 avoids that path.
    return Spans(part.query_spans.bounds, max(2, part.query_spans.longest)), part.key_spans


def _forward(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    return flash_forward(query, key, value, *_spans(part), scale, causal=part.causal, window=part.window)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return flash_backward(
        grad, query, key, value, output, lse, *_spans(part), scale, causal=part.causal, window=part.window
    )


def _ordered(query_THD: Tensor) -> bool:
    hopper = query_THD.is_cuda and since_hopper() and _has_triton()  # elsewhere it was not measured
    return hopper and flash_serves(query_THD) and query_THD.shape[-1] in ORDERED_SIZES


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


FLASH = Kernels(flash_serves, _forward, _backward, _ordered)
"""FlashAttention 2 as built into torch. There may be fewer key heads than query heads."""
