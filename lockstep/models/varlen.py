"""Attention over sequences end to end, without padding, by torch's own flash-attention kernels.

Legend: T queries, S keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.models.attention import AttentionKind


@dataclass(frozen=True, slots=True)
class Spans:
    """Where sequences begin and end in a stream."""

    bounds: Tensor
    """int32: 0 and the end of each."""
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Spans:
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        return Spans(ends.to(device), max(lengths, default=0))


def varlen_serves(query_THD: Tensor, kind: AttentionKind) -> bool:
    """True if the kernels compute this kind: half precision on a GPU, no cap, no sinks, heads of at most 256."""
    plain = kind.softcap is None and kind.sinks_H is None
    half = query_THD.dtype in (torch.bfloat16, torch.float16)
    return plain and half and query_THD.device.type == "cuda" and query_THD.shape[-1] <= 256


def varlen_attention(
    query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, queries: Spans, keys: Spans, kind: AttentionKind
) -> Tensor:
    """Causal attention of each sequence's queries, which stand at the end of its keys, [T, H, D]. No gradient."""
    aten: Any = torch.ops.aten
    output: Tensor = aten._flash_attention_forward(
        query_THD.contiguous(),
        key_SKD.contiguous(),
        value_SKD.contiguous(),
        queries.bounds,
        keys.bounds,
        queries.longest,
        keys.longest,
        0.0,
        True,
        False,
        scale=kind.scale,
        window_size_left=None if kind.window is None else kind.window - 1,
        window_size_right=None if kind.window is None else 0,
    )[0]
    return output
