"""What an engine must know of a transformers model before it can decode with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.models.attention import require_attention_only
from lockstep.models.heads import Head, head_of


def context_of(config: Any) -> int | None:
    """Longest sequence that a model takes; None if its config does not say.

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
    context: int
    """Longest sequence that it takes; 0 if it does not say."""

    @staticmethod
    def of(model: nn.Module) -> Decoder:
        """`model` may be a PEFT model. Raises ModelError for a model that cannot run on packed tokens."""
        outer: Any = model
        base: Any = outer.get_base_model() if hasattr(model, "get_base_model") else outer
        require_attention_only(base)
        config = base.config.get_text_config()
        return Decoder(
            base,
            base.get_decoder(),
            head_of(base),
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            context_of(config) or 0,
        )
