"""Tiny random models of many families, for tests of which norms feed what."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 16},
    "Gemma3": {"sliding_window": 16},
    "Olmo2": {},
    "Phi": {},
    "Cohere": {},
    "Glm4": {},
    "Starcoder2": {},
    "Qwen3Moe": EXPERTS,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny(family: str, *, seed: int = 0) -> nn.Module:
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**(SIZES | FAMILIES[family]))
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():  # norms begin as ones (or zeros): give them values that differ
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
