"""A Llama laid out as vLLM lays it out: q, k and v in one matrix, gate and up in another, a padded vocabulary, a tied head.

The modules have vLLM's attributes and a loader that works as vLLM's does (models/llama.py, models/qwen2.py); the arithmetic is
not vLLM's. It exists because the mapping of layouts must be tested where vLLM cannot run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

PADDING = 64


class Fused(nn.Module):
    """Several linear layers one below the other."""

    def __init__(self, inputs: int, sizes: list[int], *, bias: bool) -> None:
        super().__init__()
        self.output_sizes, self.tp_size = sizes, 1
        self.weight = nn.Parameter(torch.full((sum(sizes), inputs), torch.nan), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.full((sum(sizes),), torch.nan), requires_grad=False)


class Padded(nn.Module):
    """An embedding or a head whose rows are padded."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.org_vocab_size, self.tp_size = rows, 1
        padded = -(-rows // PADDING) * PADDING
        self.weight = nn.Parameter(torch.full((padded, hidden), torch.nan), requires_grad=False)


class Plain(nn.Module):
    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.tp_size = 1
        self.weight = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.full(shape[:1], torch.nan), requires_grad=False)


class FusedLlama(nn.Module):
    """Its parameters only."""

    packed_modules_mapping = {  # noqa: RUF012 - as vLLM has it
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.tied = config.tie_word_embeddings
        self.model = nn.Module()
        self.model.embed_tokens = Padded(config.vocab_size, hidden)
        self.model.layers = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            layer = nn.Module()
            layer.self_attn = nn.Module()
            layer.self_attn.qkv_proj = Fused(hidden, [queries, keys, keys], bias=config.attention_bias)
            layer.self_attn.o_proj = Plain(hidden, queries, bias=config.attention_bias)
            layer.mlp = nn.Module()
            layer.mlp.gate_up_proj = Fused(hidden, [config.intermediate_size] * 2, bias=False)
            layer.mlp.down_proj = Plain(hidden, config.intermediate_size)
            layer.input_layernorm, layer.post_attention_layernorm = Plain(hidden), Plain(hidden)
            self.model.layers.append(layer)
        self.model.norm = Plain(hidden)
        self.lm_head = self.model.embed_tokens if self.tied else Padded(config.vocab_size, hidden)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """By name, one tensor after the other; like vLLM's it leaves out the head of a tied model without a word."""
        parameters = dict(self.named_parameters())
        taken = set()
        for name, tensor in weights:
            if self.tied and name.startswith("lm_head."):
                continue
            for fused, parts in self.packed_modules_mapping.items():
                part = next((p for p in parts if f".{p}." in name), None)
                if part is not None:
                    own = name.replace(f".{part}.", f".{fused}.")
                    sizes = dict(self.named_modules())[own.rpartition(".")[0]].output_sizes
                    start = sum(sizes[: parts.index(part)])
                    rows = parameters[own].data[start : start + len(tensor)]
                    break
            else:
                own, rows = name, parameters[name].data[: len(tensor)]
            assert rows.shape == tensor.shape, name
            rows.copy_(tensor)
            if isinstance(dict(self.named_modules())[own.rpartition(".")[0]], Padded):
                parameters[own].data[len(tensor) :] = 0
            taken.add(own)
        return taken
