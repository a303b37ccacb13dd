"""Attention of a packed stream by flash-attention kernels that take segments end to end: no padding, no mask, no loop.

Every segment of the stream (root, prompt, response, padding) attends to itself causally, all of them in one call. A segment
attends to all tokens of those that it continues: a group's responses, as one block of queries, to their prompt, and every
segment to the root. The parts are merged by their log-sum-exps, which equals the softmax over their union. In the backward pass
a probability of the union is exp(score - merged log-sum-exp) and the row term is grad · merged output, so each part's kernel
gives its own share of the gradients when it receives those two (ring attention uses the same identity: Liu et al., arXiv
2310.01889).

Legend: T tokens of the stream, Q queries and S keys of a part, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.models.varlen import Spans, flash_backward, flash_forward, flash_serves


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel call: the i-th segment of a range of queries attends to the i-th segment of a range of keys."""

    queries: slice
    keys: slice
    query_spans: Spans
    """The segments, relative to the range."""
    key_spans: Spans
    causal: bool

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


def flash_attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    parts: Sequence[Part],
    scale: float,
    kernels: Kernels,
    tiles: Tensor | None = None,
) -> Tensor:
    """Compute attention [T, H, D] over the union of the parts, the first of which covers the stream; differentiable once.

    With `tiles` the forward pass is that of models.ordered_attention, and the parts' kernels compute gradients alone.
    """
    function: Any = _FlashAttention
    output_THD: Tensor = function.apply(query_THD, key_TKD, value_TKD, tuple(parts), scale, kernels, tiles)
    return output_THD


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        parts: tuple[Part, ...],
        scale: float,
        kernels: Kernels,
        tiles: Tensor | None,
    ) -> Tensor:
        if tiles is None:
            output_THD, lse_HT = kernels.forward(query_THD, key_TKD, value_TKD, parts[0], scale)
        else:
            from lockstep.models.ordered_attention import stream_attention  # Triton

            output_THD, lse_HT = stream_attention(query_THD, key_TKD, value_TKD, tiles, scale)
        for part in parts[1:] if tiles is None else ():
            query, key, value = query_THD[part.queries], key_TKD[part.keys], value_TKD[part.keys]
            merge_(output_THD[part.queries], lse_HT[:, part.queries], *kernels.forward(query, key, value, part, scale))
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, output_THD, lse_HT)
        ctx.parts, ctx.scale, ctx.kernels = parts, scale, kernels
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_THD,) = grads
        query_THD, key_TKD, value_TKD, output_THD, lse_HT = ctx.saved_tensors

        def share(part: Part) -> tuple[Tensor, Tensor, Tensor]:
            rows, keys = part.queries, part.keys
            result: tuple[Tensor, Tensor, Tensor] = ctx.kernels.backward(
                grad_THD[rows],
                query_THD[rows],
                key_TKD[keys],
                value_TKD[keys],
                output_THD[rows],
                lse_HT[:, rows].contiguous(),  # the kernels read it by address, without strides
                part,
                ctx.scale,
            )
            return result

        grad_query, grad_key, grad_value = share(ctx.parts[0])
        for part in ctx.parts[1:]:
            more_query, more_key, more_value = share(part)
            grad_query[part.queries] += more_query
            grad_key[part.keys] += more_key
            grad_value[part.keys] += more_value
        return grad_query, grad_key, grad_value, None, None, None, None


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
    return flash_forward(query, key, value, *_spans(part), scale, causal=part.causal)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return flash_backward(grad, query, key, value, output, lse, *_spans(part), scale, causal=part.causal)


FLASH = Kernels(flash_serves, _forward, _backward)
"""FlashAttention 2 as built into torch. There may be fewer key heads than query heads."""
