"""One attention function for training and sampling, registered with transformers as "lockstep".

Both the learner and the engine run the model on one stream of tokens, [1, T], without padding. Visibility is not given
by a mask but by a `Layout` that travels with the call as a keyword: the learner's knows where sequences begin and which share
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

from lockstep.errors import ModelError
from lockstep.models.blockwise import blockwise_attention
from lockstep.models.states import Run, follow_layouts, no_layout, state_layers

NAME = "lockstep"
KEPT_MASK = 2**20
"""Largest mask, in entries, that is kept for the next layer and step; 64 masks at most."""
SMALL = 2**16
"""Queries × keys up to which a CPU multiplies the matrices outright: its fused kernel is several times slower there, above all
backward. Beyond, the score matrix would cost more memory than it saves time."""
BLOCKWISE = frozenset({"cpu"})
"""Devices on which larger ones with sinks, caps or windows run in blocks of queries; elsewhere that was not measured yet."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Settings of a layer's attention beyond causality."""

    scale: float
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None sees all."""
    softcap: float | None = None
    """Scores are squashed to softcap * tanh(score / softcap) (Gemma 2)."""
    sinks_H: Tensor | None = None
    """A score per head that takes part in the softmax and carries no value (gpt-oss)."""


def kind_of_layer(attention: Any, config: Any) -> AttentionKind:
    """Return what the attention of a layer computes: of a family whose layers have a scale of their own."""
    window = getattr(attention, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral", "phi3"):  # theirs is the same in all layers
        window = config.sliding_window
    softcap = attention.attn_logit_softcapping if config.model_type == "gemma2" else None
    return AttentionKind(float(attention.scaling), window, softcap, getattr(attention, "sinks", None))


class Layout(Protocol):
    """Says what each token of the stream may see."""

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        """Compute the attention output [T, H, D], with values of another size than keys [T, H, Dv]."""

    def mix(self, layer: int, hidden_TH: Tensor, run: Run) -> Tensor:
        """Compute a layer that carries a state from token to token, [T, H]."""


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
    """Implement transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
    if layout is None:
        raise no_layout(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window == "unsaid":  # the family leaves it to the mask, which is made for all layers alike (PhiMoE)
        sliding_window = _unsaid_window(module)
    kind = AttentionKind(scale, sliding_window or None, softcap, s_aux)  # 0 is none, too (Qwen2-MoE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    # not query[0], whose backward pass would copy the gradient into zeros, with tokens and heads exchanged
    return layout.attend(layer, query.squeeze(0), key.squeeze(0), value.squeeze(0), kind)[None], None


def _unsaid_window(module: Any) -> int | None:
    """Return the window of a layer that does not pass it on: the config's, but for a layer that is listed as full (Qwen2-MoE)."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    full = kinds is not None and kinds[module.layer_idx] == "full_attention"
    return None if full else getattr(config, "sliding_window", None)


AttentionInterface.register(NAME, lockstep_attention)


SERVED = {"full_attention", "sliding_attention"}
"""Kinds of layers that a Layout always serves."""
WITH_STATE = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
"""Kinds of layers of a model that has layers with a state, or none that mixes tokens."""


EXPLAINED = {
    "chunked_attention": "attention in chunks of tokens",
    "indexed_attention": "attention to tokens that an index chooses",
    "compressed_sparse_attention": "attention to chosen, compressed tokens",
    "heavily_compressed_attention": "attention to compressed tokens",
    "linear_attention": "a state without a convolution, or a cache of its own",
    "recurrent": "a state that is kept in no cache of transformers",
}
"""Explanations of kinds of layers that are refused."""


def require_packable(model: nn.Module) -> None:
    """Raise ModelError, naming the kinds of layers, for a model that mixes tokens in ways that a Layout cannot express.

    On a packed stream such a layer would silently mix neighbouring sequences.
    """
    config: Any = model.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - SERVED
    if getattr(model, "_is_stateful", False):
        kinds.add("recurrent")
    if state_layers(model):
        kinds -= WITH_STATE | {"recurrent"}
    if kinds:
        raise ModelError(
            f"the model has {', '.join(sorted(kinds))} layers, which cannot run on packed sequences"
            + "".join(f"; {kind}: {EXPLAINED[kind]}" for kind in sorted(kinds) if kind in EXPLAINED),
            where=type(model).__name__,
            fix="choose a model with full or sliding-window attention in every layer, or a gated delta net (docs/models.md)",
        )


def prepare_layers(model: nn.Module) -> None:
    """Make a model's layers with a state follow a Layout. Raises ModelError as `require_packable` does."""
    require_packable(model)
    follow_layouts(model)


def dense_attention(
    query_NHQD: Tensor, key_NKSD: Tensor, value_NKSD: Tensor, mask_NQS: Tensor | None, kind: AttentionKind
) -> Tensor:
    """Compute attention of padded blocks, [N, H, Q, Dv]. `mask_NQS` is True where a query may look; None is causal with Q = S."""
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


def causal_attention(query_NHQD: Tensor, key_NKSD: Tensor, value_NKSD: Tensor, kind: AttentionKind) -> Tensor:
    """Compute attention of padded blocks, [N, H, Q, Dv]: the last query is at the last key, and each sees what is before it."""
    queries, keys = query_NHQD.shape[2], key_NKSD.shape[2]
    window = kind.window if kind.window is not None and kind.window < keys else None
    special = kind.softcap is not None or kind.sinks_H is not None or window is not None
    if special and query_NHQD.device.type in BLOCKWISE and queries * keys > SMALL:
        return blockwise_attention(query_NHQD, key_NKSD, value_NKSD, kind.scale, window, kind.softcap, kind.sinks_H)
    mask = None if queries == keys else causal_mask(queries, keys, window, key_NKSD.device)
    return dense_attention(query_NHQD, key_NKSD, value_NKSD, mask, kind)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [1, queries, keys], True where a query may look: the last query is at the last key, and sees `window` keys."""
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
    scores = wide_product(stacked, key_NKSD.transpose(-1, -2)).view(count, heads, queries, keys) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~mask_NQS[:, None], -torch.inf)
    if kind.sinks_H is None:
        probs = scores.softmax(-1)
    else:
        sinks = kind.sinks_H.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    output = wide_product(probs.reshape(count, kv_heads, heads // kv_heads * queries, keys), value_NKSD)
    return output.to(query_NHQD.dtype).view(count, heads, queries, value_NKSD.shape[-1])


def wide_product(left_NKRX: Tensor, right_NKXC: Tensor) -> Tensor:
    """Multiply in the precision of the right side; returns fp32, or fp64 if that is.

    Without a gradient a GPU keeps what it sums in fp32, and a left side in fp32 counts as two numbers of half precision each:
    scores and probabilities that are rounded to bf16 add to the difference between sampling and training. torch has no backward
    pass of this product.
    """
    dtype = right_NKXC.dtype
    graph = torch.is_grad_enabled() and (left_NKRX.requires_grad or right_NKXC.requires_grad)
    if not right_NKXC.is_cuda or dtype not in (torch.bfloat16, torch.float16) or graph:
        product = left_NKRX.to(dtype) @ right_NKXC
        return product if dtype == torch.float64 else product.float()
    high = left_NKRX.to(dtype)
    if left_NKRX.dtype != dtype:
        return wide_product(high, right_NKXC) + wide_product((left_NKRX - high).to(dtype), right_NKXC)
    wide: Tensor = torch.bmm(high.flatten(0, 1), right_NKXC.flatten(0, 1), out_dtype=torch.float32)
    return wide.view(*left_NKRX.shape[:3], -1)
