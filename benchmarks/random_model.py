"""A model folder with random weights in a named shape and a byte-level tokenizer, for benchmarks: one character is one token.

python benchmarks/random_model.py OUT --shape 1.5b
"""

from __future__ import annotations

import argparse
import random
import string
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "inner": 128, "layers": 2, "heads": 4, "kv": 2, "vocab": 1024},
    "40m": {"hidden": 512, "inner": 1408, "layers": 8, "heads": 8, "kv": 2, "vocab": 32000},
    "0.5b": {"hidden": 896, "inner": 4864, "layers": 24, "heads": 14, "kv": 2, "vocab": 151936},
    "1.5b": {"hidden": 1536, "inner": 8960, "layers": 28, "heads": 12, "kv": 2, "vocab": 151936},
    "7b": {"hidden": 3584, "inner": 18944, "layers": 28, "heads": 28, "kv": 4, "vocab": 152064},
    "llama-1b": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv": 8, "vocab": 128256, "family": "Llama"},
    "qwen3-1.7b": {
        "hidden": 2048, "inner": 6144, "layers": 28, "heads": 16, "kv": 8, "vocab": 151936, "family": "Qwen3", "size": 128,
    },
}  # fmt: skip
"""Qwen2.5's where no family is said."""
OSS: dict[str, dict[str, int]] = {
    "gpt-oss-20b": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
    },
    "gpt-oss-tiny": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1024,
    },
}  # fmt: skip
"""Written as published checkpoints are, with experts in MXFP4."""
END, PAD, BEGIN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def config_of(shape: str) -> Any:
    import transformers

    s = SHAPES[shape]
    vocab, family = s["vocab"], s.get("family", "Qwen2")
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocab,
        hidden_size=s["hidden"],
        intermediate_size=s["inner"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        head_dim=s.get("size", s["hidden"] // s["heads"]),
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=shape != "7b",
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=vocab - 291,
        pad_token_id=vocab - 293,
        architectures=[f"{family}ForCausalLM"],
    )


def random_model(shape: str, dtype: str = "bfloat16", device: str = "cuda", attention: str = "sdpa") -> Any:
    """The model with transformers' own random initialisation, on `device`."""
    import torch
    import transformers

    config = config_of(shape)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            family = getattr(transformers, config.architectures[0])
            model = family._from_config(config, attn_implementation=attention)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Every printable character is a token; random longer ones fill the vocabulary, and no merge ever makes one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = {character: index for index, character in enumerate(alphabet)}
    draw, letters = random.Random(0), string.ascii_letters + string.digits
    while len(entries) < vocab - 293:
        entries.setdefault("".join(draw.choices(letters, k=draw.randrange(3, 8))), len(entries))
    named = {vocab - 293: PAD, vocab - 292: BEGIN, vocab - 291: END}
    entries |= {named.get(index, f"<|extra_{index}|>"): index for index in range(vocab - 293, vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, padding_side="left", model_max_length=32768
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_oss(folder: Path, shape: str, device: str) -> None:
    """Write a file for each layer, and one for the rest."""
    import json

    import torch
    import transformers
    from safetensors.torch import save_file

    vocab = OSS[shape]["vocab_size"]
    config = transformers.GptOssConfig(
        **OSS[shape],
        bos_token_id=None,
        eos_token_id=vocab - 291,
        pad_token_id=vocab - 293,
        architectures=["GptOssForCausalLM"],
    )
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(written))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.GptOssForCausalLM(config).named_parameters()}
    draw = torch.Generator(device).manual_seed(0)
    files: dict[str, dict[str, Any]] = {}
    for name, size in shapes.items():
        parts = name.split(".")
        tensors = files.setdefault(f"layer_{parts[2]}" if parts[1] == "layers" else "rest", {})
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = size
            packed = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*packed, 16), generator=draw, device=device, dtype=torch.uint8)
            scales = torch.randint(117, 121, packed, generator=draw, device=device, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales.cpu()}
        elif "norm" in name:
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            tensors[name] = (torch.randn(size, generator=draw, device=device) * 0.02).bfloat16().cpu()
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
    places = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    write_tokenizer(folder, vocab)


def write_model(folder: Path, shape: str, device: str = "cuda") -> None:
    if shape in OSS:
        write_oss(folder, shape, device)
        return
    model = random_model(shape, device=device)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    write_tokenizer(folder, SHAPES[shape]["vocab"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES, *OSS], default="1.5b")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    write_model(arguments.out, arguments.shape, arguments.device)
