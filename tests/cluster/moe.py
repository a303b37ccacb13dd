"""A tiny random model with experts, and the tokenizer of the tiny model."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import VOCABULARY, write_tiny_tokenizer


def write_tiny_moe(folder: Path) -> None:
    """Write a Qwen3-MoE of two layers and four experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
