"""A tiny random gpt-oss whose experts are written in MXFP4, in the documented layout, by a writer of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny import write_tiny_tokenizer

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def write_mxfp4_model(
    folder: Path, *, hidden: int = 64, width: int = 32, experts: int = 4, shards: bool = False
) -> None:
    """Random bf16 weights; expert matrices in blocks and scales, the router in fp32 as some checkpoints have it."""
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=640,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=experts,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=4096,
        pad_token_id=2,
        eos_token_id=2,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).to(torch.bfloat16)
        tensors: dict[str, Tensor] = {}
        for name, parameter in model.state_dict().items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_blocks(tuple(parameter.shape))
            elif "router" in name:
                tensors[name] = torch.randn_like(parameter, dtype=torch.float32)
            else:
                tensors[name] = torch.randn_like(parameter) * 0.1 if "sinks" in name or "bias" in name else parameter
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    written["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "pad_token_id": 2}))
    write_tiny_tokenizer(folder)
    if not shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)  # blocks and scales of a parameter fall into different shards
    places = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in sorted(set(places.values())):
        chosen = {name: tensors[name] for name in names if places[name] == shard}
        save_file(chosen, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def random_blocks(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes and scales of a parameter [experts, inputs, outputs], always the same ones."""
    experts, inputs, outputs = shape
    draw = torch.Generator().manual_seed(inputs)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=draw)
    return blocks, scales


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """By loops over every number, from the description of the layout."""
    experts, outputs, groups, _ = blocks.shape
    result = torch.zeros(experts, groups * 32, outputs)
    values: Any = blocks.tolist()
    powers: Any = scales.tolist()
    for e in range(experts):
        for o in range(outputs):
            for g in range(groups):
                for byte in range(16):
                    for half in range(2):
                        code = values[e][o][g][byte] >> (4 * half) & 15
                        number = VALUES[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (powers[e][o][g] - 127)
                        result[e, 32 * g + 2 * byte + half, o] = number
    return result


def keep_in_four_bits(model: Any) -> None:
    """Give a gpt-oss random experts that stay in MXFP4, in place of its own."""
    from lockstep.models.mxfp4 import Packed
    from lockstep.models.mxfp4_experts import Mxfp4Experts

    for layer in model.model.layers:
        dense = layer.mlp.experts
        parts = [random_blocks(tuple(one.shape)) for one in (dense.gate_up_proj, dense.down_proj)]
        device = dense.gate_up_proj.device
        layer.mlp.experts = Mxfp4Experts(dense, *(Packed.of(*(half.to(device) for half in part)) for part in parts))
