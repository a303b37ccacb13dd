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


def write_model(folder: Path, shape: str, device: str = "cuda") -> None:
    model = random_model(shape, device=device)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    write_tokenizer(folder, SHAPES[shape]["vocab"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    write_model(arguments.out, arguments.shape, arguments.device)
