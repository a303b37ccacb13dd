"""Mixtures as vLLM 0.24 lays them out for its Triton kernels (models/qwen3_moe.py, models/gpt_oss.py); parameters only."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

OSS_RULES = SimpleNamespace(
    orig_to_new_substr={".self_attn.": ".attn."},
    orig_to_new_suffix={
        ".embed_tokens.weight": ".embedding.weight",
        ".gate_up_proj_blocks": ".w13_weight",
        ".gate_up_proj_scales": ".w13_weight_scale",
        ".gate_up_proj": ".w13_weight",
        ".down_proj": ".w2_weight",
        ".gate_up_proj_bias": ".w13_bias",
        ".down_proj_bias": ".w2_bias",
        ".gate_up_proj.weight": ".w13_weight",
        ".gate_up_proj.input_scale": ".w13_input_scale",
        ".down_proj.weight": ".w2_weight",
    },
)
"""Rules of vLLM's model of gpt-oss, most of them for checkpoints of other forms."""


def mixture(family: str) -> Any:
    """A small model of transformers with random weights."""
    sizes: dict[str, Any] = {"vocab_size": 130, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                             "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}  # fmt: skip
    kinds = {
        "qwen3_moe": lambda: Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=24, intermediate_size=24),
        "gpt_oss": lambda: GptOssConfig(**sizes, num_local_experts=4, intermediate_size=24),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kinds[family]()).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


class LaidOut(nn.Module):
    """vLLM's parameters of such a model, not set yet."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.paired = model.config.model_type == "gpt_oss"
        self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self.hf_to_vllm_mapper = OSS_RULES if self.paired else None
        self.parts: dict[str, tuple[str, slice]] = {}
        """Where a tensor of the checkpoint lies: a parameter, and its rows."""
        shapes: dict[str, list[int]] = {}
        sizes: dict[str, list[int]] = {}
        for name, tensor in model.named_parameters():
            own, shape = self.renamed(name), list(tensor.shape)
            if ".experts." in name:
                shapes[own] = [shape[0], shape[2], shape[1]] if self.paired and len(shape) == 3 else shape
                continue
            rows = shapes.setdefault(own, [0, *shape[1:]])
            if own.endswith(".weight"):
                sizes.setdefault(own.removesuffix(".weight"), []).append(shape[0])
            self.parts[name] = own, slice(rows[0], rows[0] + shape[0])
            rows[0] += shape[0]
        for own, shape in shapes.items():
            module: nn.Module = self
            *path, leaf = own.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.full(shape, torch.nan), requires_grad=False))
            if path[-1] == "qkv_proj":
                module.output_sizes = sizes[".".join(path)]  # type: ignore[assignment]

    def renamed(self, name: str) -> str:
        """vLLM's name of a parameter."""
        inside = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight", "gate_up_proj_bias": "w13_bias",
                  "down_proj_bias": "w2_bias"}  # fmt: skip
        layer, _, leaf = name.rpartition(".")
        if ".experts." in name:
            return f"{layer}.routed_experts.{inside[leaf]}"
        parent, _, last = layer.rpartition(".")
        if last in self.packed_modules_mapping["qkv_proj"]:
            layer = f"{parent}.qkv_proj"
        if self.paired:
            layer = layer.replace(".self_attn", ".attn").replace("embed_tokens", "embedding")
        return f"{layer}.{leaf}"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take tensors by the checkpoint's names; those of experts have others there, and are passed over in silence."""
        taken = set()
        for name, tensor in weights:
            if name in self.parts:
                own, rows = self.parts[name]
                self.get_parameter(own).data[rows].copy_(tensor)
                taken.add(own)
        return taken
