"""Collects the facts of a transformers model that an engine needs to decode with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.models.attention import prepare_layers
from lockstep.models.heads import Head, head_of
from lockstep.models.states import state_layers


def context_of(config: Any) -> int | None:
    """Return the longest sequence that a model takes; None if its config does not say.

    LongRoPE (Phi-3, Phi-4) has other frequencies for all of a sequence once it is longer than the original context. Keys that
    an engine holds, or that a long and a short reply share, can have only one of them: such a model takes sequences up to there.
    """
    text = config.get_text_config()
    lengths = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope":
            lengths.append(one.get("original_max_position_embeddings"))
    return min((int(length) for length in lengths if length), default=None)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model taken apart. Example: module(input_ids=…).last_hidden_state, then head.logits(…)."""

    model: Any
    """The causal language model, without PEFT around it."""
    module: Any
    """Its decoder."""
    head: Head
    layers: int
    kv_heads: int
    head_size: int
    """Both are 0 where layers differ in them, values have another size than keys, or layers carry states."""
    context: int
    """Longest sequence that it takes; 0 if it does not say."""

    @staticmethod
    def of(model: nn.Module) -> Decoder:
        """Take a model apart, which may be a PEFT model. Raises ModelError for a model that cannot run on packed tokens."""
        outer: Any = model
        base: Any = outer.get_base_model() if hasattr(model, "get_base_model") else outer
        prepare_layers(base)
        config = base.config.get_text_config()
        return Decoder(
            base,
            base.get_decoder(),
            head_of(base),
            config.num_hidden_layers,
            *even_heads(base),
            context_of(config) or 0,
        )


def even_heads(model: Any) -> tuple[int, int]:
    """Return the key/value heads of every layer and their size; zeros where these differ, or where a layer carries a state."""
    config = model.config.get_text_config()
    if getattr(config, "is_heterogeneous", False) or getattr(config, "kv_lora_rank", None) or state_layers(model):
        return 0, 0
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ratios = {getattr(module, "num_key_value_groups", 0) for module in model.get_decoder().modules()} - {0}
    if getattr(config, "v_head_dim", None) not in (None, size) or len(ratios) > 1:
        return 0, 0
    heads = config.num_attention_heads
    told = getattr(config, "num_key_value_heads", None) or heads
    # JetMoE repeats its keys itself: attention gets more heads of them than the config tells.
    seen = heads // max(ratios, default=heads)
    return max(told, seen), size
