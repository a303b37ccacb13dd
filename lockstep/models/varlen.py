"""Attention over packed sequences, without padding, by torch's own flash-attention kernels (FlashAttention 2).

Legend: T queries, S keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.models.attention import AttentionKind
from lockstep.models.host import on_device


@dataclass(frozen=True, slots=True)
class Spans:
    """Bounds of sequences in a stream."""

    bounds: Tensor
    """int32: 0 and the end of each."""
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Spans:
        bounds = on_device(np.cumsum([0, *lengths], dtype=np.int32), device)
        return Spans(bounds, max(lengths, default=0))


def flash_serves(query_THD: Tensor) -> bool:
    """Return whether the kernels take such queries: half precision on NVIDIA GPUs from Ampere on, heads of at most 256 in steps
    of 8."""
    half = query_THD.dtype in (torch.bfloat16, torch.float16)
    size = query_THD.shape[-1]
    return half and query_THD.is_cuda and size <= 256 and size % 8 == 0 and _new_enough(query_THD.device)


@cache
def _new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0) and torch.backends.cuda.is_flash_attention_available()


def flash_forward(
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    queries: Spans,
    keys: Spans,
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from the i-th span of queries to the i-th span of keys: output [T, H, D] and fp32 log-sum-exps [H, T]. No gradient.

    Causal aligns the ends of both; `window` is that of an AttentionKind.
    """
    aten: Any = torch.ops.aten
    output_THD, lse_HT, *_ = aten._flash_attention_forward(
        query_THD,
        key_SKD,
        value_SKD,
        queries.bounds,
        keys.bounds,
        queries.longest,
        keys.longest,
        0.0,
        causal,
        False,
        scale=scale,
        **_window(window),
    )
    return output_THD, lse_HT


def flash_backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    output_THD: Tensor,
    lse_HT: Tensor,
    queries: Spans,
    keys: Spans,
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given what `flash_forward` returned."""
    aten: Any = torch.ops.aten
    device = grad_THD.device
    no_dropout = torch.empty(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    bounds, longest = (queries.bounds, keys.bounds), (queries.longest, keys.longest)
    grads: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
        grad_THD,
        query_THD,
        key_SKD,
        value_SKD,
        output_THD,
        lse_HT,
        *bounds,
        *longest,
        0.0,
        causal,
        *no_dropout,
        scale=scale,
        **_window(window),
    )
    return grads


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def varlen_serves(query_THD: Tensor, kind: AttentionKind) -> bool:
    """Return whether the kernels compute this kind of attention for these queries: no cap."""
    return kind.softcap is None and flash_serves(query_THD)


def varlen_attention(
    query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, queries: Spans, keys: Spans, kind: AttentionKind
) -> Tensor:
    """Compute causal attention of each sequence's queries, which stand at the end of its keys, [T, H, D]. No gradient."""
    given = query_THD.contiguous(), key_SKD.contiguous(), value_SKD.contiguous()
    output_THD, lse_HT = flash_forward(*given, queries, keys, kind.scale, causal=True, window=kind.window)
    if kind.sinks_H is None:
        return output_THD
    share_HT = torch.sigmoid(lse_HT - kind.sinks_H.float()[:, None])  # of the keys; the rest is the sink's
    return output_THD.mul_(share_HT.T[..., None])  # in fp32, rounded once
