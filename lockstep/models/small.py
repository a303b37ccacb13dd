"""Makes a small random copy of a model (the same kinds of layers, few and narrow), to compare two ways of computing it.

Ratios and kinds are kept (heads to key/value heads, experts, every kind of layer, partial rotation, tied weights), and lengths
at which the computation changes become short: a window of WINDOW tokens, LongRoPE's original context of ORIGINAL.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lockstep.models.attention import NAME as ATTENTION
from lockstep.models.load import parts_of, quiet
from lockstep.models.states import follow_layouts
from lockstep.models.weights import stored_buffers

WINDOW, ORIGINAL, CONTEXT = 6, 24, 64
LAYERS, HEAD, VOCABULARY, WIDTH = 4, 16, 320, 64
MOST = 3 * 10**7
"""Largest number of parameters of a copy: with more, something large was not made small."""
SPREAD = 0.08
"""Standard deviation of the matrices. A layer then changes its input about as much as one of transformers' own initial layers
(0.02 and 2,048 inputs), and rounding in fp32 stays below 1e-5 nats."""

_SIZES = {
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim"), WIDTH
    ),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "dense_intermediate_size", "feed_forward_size"), WIDTH),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "top_k_experts", "moe_topk", "moe_k", "n_group"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input", "index_head_dim"), HEAD),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim", "global_head_dim"), HEAD),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "d_embed", "query_pre_attn_scalar", "laurel_rank"), HEAD),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("image_size", "mm_tokens_per_image"), 32),
}
"""Settings, with their largest size in a copy."""


def small_config(config: Any) -> Any:
    """Return a copy of a transformers config with small sizes; `config` stays as it is."""
    small = copy.deepcopy(config)
    for part in parts_of(small):
        _shrink(part)
    return small


def random_model(kind: type[nn.Module], config: Any, attention: str) -> nn.Module:
    """Return a model with random fp32 weights, always the same; vectors and stored buffers are random too, so that each matters.

    Raises ValueError if it would not be small, and whatever transformers raises for the config.
    """
    made: Any = kind
    with quiet():
        with torch.device("meta"):
            count = sum(p.numel() for p in made._from_config(copy.deepcopy(config)).parameters())
        if count > MOST:
            raise ValueError(f"the small copy has {count:,} parameters")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # some families draw a part of their vectors themselves
            model: nn.Module = made._from_config(
                copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention
            ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(buffer for _, buffer in stored_buffers(model))):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(SPREAD * noise if tensor.dim() > 1 else tensor + SPREAD * noise)
    if attention == ATTENTION:
        follow_layouts(model)
    return model


def _shrink(config: Any) -> None:
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    head = _number(config, "head_dim")
    hidden, original = _number(config, "hidden_size"), _original(config)
    for name, size in _SIZES.items():
        if _number(config, name) > size:
            setattr(config, name, size)
    if heads:
        kv_heads = _number(config, "num_key_value_heads") or heads
        few = min(4 if kv_heads == heads else 2, kv_heads)
        count = few if kv_heads == heads else 4
        for name, number in (("num_attention_heads", count), ("num_key_value_heads", few)):
            if _number(config, name):
                setattr(config, name, number)
        if head:  # of latent attention the part that is rotated
            config.head_dim = _number(config, "qk_rope_head_dim") or HEAD
        if hidden:
            config.hidden_size = count * HEAD * (1 if not head or hidden == heads * head else 2)
    if layers:
        _fewer_layers(config, layers)
    for name, value in list(vars(config).items()):
        if name.startswith("vocab_size") and isinstance(value, int):
            setattr(config, name, min(value, VOCABULARY))
        elif name.endswith(("token_id", "token_index")) and value is not None:
            setattr(config, name, {"pad": 0, "bos": 1}.get(name[:3], 2))
    _shorten(config, original)


def _fewer_layers(config: Any, layers: int) -> None:
    """Keep at most LAYERS of them, each kind that the config's lists tell apart at least once where there is room."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == layers}
    kinds = list(zip(*lists.values(), strict=True)) if lists else [()] * layers
    first = [place for place, kind in enumerate(map(str, kinds)) if kind not in map(str, kinds[:place])]
    chosen = sorted([*first, *(place for place in range(layers) if place not in first)][: min(layers, LAYERS)])
    for name, value in lists.items():
        setattr(config, name, [value[place] for place in chosen])
    config.num_hidden_layers = len(chosen)


def _original(config: Any) -> int:
    """Return LongRoPE's original context; 0 for another kind of positions."""
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return 0


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the settings of rotary positions: one, or one for each kind of layer."""
    rope = vars(config).get("rope_parameters") or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _shorten(config: Any, original: int) -> None:
    """Set a short context, in the same ratio to LongRoPE's original one, and scaling factors for heads of size HEAD."""
    context = _number(config, "max_position_embeddings")
    if original:
        config.max_position_embeddings = ORIGINAL * max(1, context // original)
        if _number(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = ORIGINAL
    elif context > CONTEXT:
        config.max_position_embeddings = CONTEXT
    for rope in _ropes(config):
        turned = int(HEAD * float(rope.get("partial_rotary_factor") or 1)) // 2
        for name in ("short_factor", "long_factor"):
            if isinstance(factors := rope.get(name), list):
                rope[name] = [factors[place * len(factors) // turned] for place in range(turned)]
        if original and "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ORIGINAL


def _number(config: Any, name: str) -> int:
    """Return a whole number of the config, under transformers' common name for it; 0 if it has none."""
    value = vars(config).get(config.attribute_map.get(name, name))
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
