"""One attention function for training and sampling, registered with transformers as "lockstep".

Both the learner and the engine run the model on one stream of tokens, [1, T], without padding. What a token may see is not
in a mask but in a `Layout` that travels with the call as a keyword: the learner's knows where sequences begin and which share
a prompt, the engine's also holds the keys and values of the tokens already processed. Any decoder of transformers that takes
its attention from the registry therefore trains and samples here without changes.

Shapes: H query heads, K key/value heads, D head size, T tokens of the stream, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from lockstep.errors import EngineError, ModelError

NAME = "lockstep"
KEPT_MASK = 2**20
"""Entries up to which a mask is kept for the next layer and step; 64 of them at most."""
SMALL = 2**16
"""Queries × keys up to which a CPU multiplies the matrices outright: its fused kernel is several times slower there, above all
backward. Beyond, the score matrix would cost more memory than it saves time."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a layer asks of attention beyond causality."""

    scale: float
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None sees all."""
    softcap: float | None = None
    """Scores are squashed to softcap * tanh(score / softcap) (Gemma 2)."""
    sinks_H: Tensor | None = None
    """A score per head that takes part in the softmax and carries no value (gpt-oss)."""


class Layout(Protocol):
    """Says what each token of the stream may see."""

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        """Attention output [T, H, D]."""


def lockstep_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | Literal["unsaid"] | None = "unsaid",
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
    if layout is None:
        raise EngineError(
            "the model was called without a token layout",
            where=type(module).__name__,
            fix="call it through the learner or the engine, or load it again with another attention implementation",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window == "unsaid":  # the family leaves it to the mask, which is made for all layers alike (PhiMoE)
        sliding_window = getattr(getattr(module, "config", None), "sliding_window", None)
    kind = AttentionKind(scale, sliding_window or None, softcap, s_aux)  # 0 is none, too (Qwen2-MoE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return layout.attend(layer, query[0], key[0], value[0], kind)[None], None


AttentionInterface.register(NAME, lockstep_attention)


def require_attention_only(model: nn.Module) -> None:
    """Raise ModelError for a model in which tokens meet otherwise than a Layout says: by recurrence, convolution or chunks.

    On a packed stream such a layer would silently mix neighbouring sequences.
    """
    config: Any = model.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(model, "_is_stateful", False):
        kinds.add("recurrent")
    if kinds:
        raise ModelError(
            f"it has {', '.join(sorted(kinds))} layers, which cannot run on packed sequences",
            where=type(model).__name__,
            fix="choose a model with full or sliding-window attention in every layer",
        )


def dense_attention(
    query_NHQD: Tensor, key_NKSD: Tensor, value_NKSD: Tensor, mask_NQS: Tensor | None, kind: AttentionKind
) -> Tensor:
    """Attention of padded blocks, [N, H, Q, D]. `mask_NQS` is True where a query may look; None is causal with Q = S."""
    plain = kind.softcap is None and kind.sinks_H is None and (mask_NQS is not None or kind.window is None)
    small = query_NHQD.device.type == "cpu" and query_NHQD.shape[2] * key_NKSD.shape[2] <= SMALL
    if plain and not small:
        return F.scaled_dot_product_attention(
            query_NHQD,
            key_NKSD,
            value_NKSD,
            attn_mask=None if mask_NQS is None else mask_NQS[:, None],
            is_causal=mask_NQS is None and query_NHQD.shape[2] > 1,
            scale=kind.scale,
            enable_gqa=query_NHQD.shape[1] != key_NKSD.shape[1],
        )
    if mask_NQS is None:
        mask_NQS = causal_mask(query_NHQD.shape[2], query_NHQD.shape[2], kind.window, query_NHQD.device)
    return _explicit_attention(query_NHQD, key_NKSD, value_NKSD, mask_NQS, kind)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[1, queries, keys], True where a query may look: the last query sits at the last key, and sees `window` keys at most."""
    make = _kept_mask if queries * keys <= KEPT_MASK else _kept_mask.__wrapped__
    return make(queries, keys, window, device)


@lru_cache(maxsize=64)
def _kept_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    mask_QS = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return (mask_QS if window is None else mask_QS.triu(keys - queries - window + 1))[None]


def _explicit_attention(
    query_NHQD: Tensor, key_NKSD: Tensor, value_NKSD: Tensor, mask_NQS: Tensor, kind: AttentionKind
) -> Tensor:
    count, heads, queries, size = query_NHQD.shape
    kv_heads, keys = key_NKSD.shape[1:3]
    # The query heads of one key head are stacked as more rows of one product: keys and values are not repeated.
    stacked = query_NHQD.reshape(count, kv_heads, heads // kv_heads * queries, size)
    scores = (stacked @ key_NKSD.transpose(-1, -2)).view(count, heads, queries, keys)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~mask_NQS[:, None], -torch.inf)
    if kind.sinks_H is None:
        probs = scores.softmax(-1)
    else:
        sinks = kind.sinks_H.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    output = probs.to(query_NHQD.dtype).reshape(count, kv_heads, heads // kv_heads * queries, keys) @ value_NKSD
    return output.view(count, heads, queries, size)
