"""What an engine must know of a transformers model before it can decode with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.models.attention import require_attention_only
from lockstep.models.heads import Head, head_of


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
            int(getattr(config, "max_position_embeddings", 0) or 0),
        )
