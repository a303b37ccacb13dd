"""Models of several families with random weights: mixtures of experts and dense ones, in the shapes of known models."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "vocab_size": 201088,
    },
    "phi-3-3.8b": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32064,
    },
    "gemma-3-1b": {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "vocab_size": 262144,
    },
    "smollm3-3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 128256,
    },
}  # fmt: skip
MODELS = {"qwen3": "Qwen3Moe", "gpt": "GptOss", "phi": "Phi3", "gemma": "Gemma3", "smollm3": "SmolLM3"}
"""Classes of transformers, by the beginning of a shape's name."""
MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b")
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 512}  # fmt: skip


def config_of(shape: str, *, cpu: bool) -> Any:
    import transformers

    name = MODELS[shape.split("-")[0]]
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    sizes = SHAPES[shape] | ({key: TINY[key] for key in TINY if key in SHAPES[shape]} if cpu else {})
    made = kind(**sizes, max_position_embeddings=8192, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    made.architectures = [f"{name}ForCausalLM"]
    return made


def random_model(shape: str, device: str, attention: str, *, cpu: bool, packed: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        config, dtype = config_of(shape, cpu=cpu), torch.float32 if cpu else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
        if packed:
            keep_in_four_bits(model)
        return model


def keep_in_four_bits(model: Any) -> None:
    """Replace the experts by random ones in MXFP4, and let the dense ones go."""
    import torch

    from lockstep.models.mxfp4 import Packed
    from lockstep.models.mxfp4_experts import Mxfp4Experts

    def drawn(parameter: Any) -> Packed:
        experts, inputs, outputs = parameter.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        return Packed.of(blocks, torch.randint(117, 121, blocks.shape[:3], dtype=torch.uint8))

    for layer in model.model.layers:
        dense = layer.mlp.experts
        layer.mlp.experts = Mxfp4Experts(dense, drawn(dense.gate_up_proj), drawn(dense.down_proj))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
