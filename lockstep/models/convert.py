"""A Llama model in a GGUF file → a clean Hugging Face folder with fp32 safetensors. Needs no torch.

transformers can read GGUF files too, but the outcome differs from the published model, so this goes its own way:
 - it marks the model as quantised and refuses to save it, although the weights were dequantised;
 - its tokenizer ignores `tokenizer.ggml.pre`: without the split at digits, blanks and line ends before a number
   become other tokens than those that the model was trained with;
 - rms_norm_eps comes back as 9.999999747378752e-06, the nearest fp32 of 1e-5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONTROL_TOKEN = 3
"""gguf.TokenType.CONTROL: a token that text never becomes."""

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF name of a Llama tensor, without block number and ".weight" → Hugging Face name."""


SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Hugging Face name → GGUF name."""

BOUNDARIES = ("bos", "eos", "pad")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a GGUF file holds. Example: fields["llama.block_count"] == 30"""

    fields: Mapping[str, Any]
    tensors: Mapping[str, NDArray[np.float32]]
    """GGUF name → values, dequantised; rows × columns as in torch."""


def convert_llama(gguf: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer with chat template, and weights of `gguf` into the empty `folder`.

    Raises:
        ModelError: the file is not a Llama model with a byte-level BPE tokenizer of a known kind.
    """
    model = read_gguf(gguf)
    _refuse_others(model, gguf)
    _write_json(folder / "config.json", llama_config(model))
    _write_json(folder / "generation_config.json", boundary_ids(model))
    _write_tokenizer(folder, model)
    _write_weights(folder / "model.safetensors", model)


def read_gguf(path: Path) -> GgufModel:
    """All fields and dequantised tensors of a GGUF file."""
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError) as error:
        raise ModelError(f"not a GGUF file: {error}", where=str(path)) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return GgufModel(fields, {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors})


def _refuse_others(model: GgufModel, path: Path) -> None:
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, value in expected.items():
        if model.fields.get(name) != value:
            raise ModelError(
                f"{name} is {model.fields.get(name)!r}; only {value!r} can be converted",
                where=str(path),
                fix="use a model in safetensors format",
            )


def llama_config(model: GgufModel) -> dict[str, object]:
    """config.json as transformers wants it."""
    fields = model.fields
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        **boundary_ids(model),
    }


def boundary_ids(model: GgufModel) -> dict[str, object]:
    """What generation_config.json holds: the ids that begin, end and pad."""
    return {f"{name}_token_id": model.fields[f"tokenizer.ggml.{SPECIAL_TOKENS[name]}_token_id"] for name in BOUNDARIES}


def _write_tokenizer(folder: Path, model: GgufModel) -> None:
    """Byte-level BPE with each digit a token of its own (`tokenizer.ggml.pre = smollm`), as SmolLM2 was trained."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = model.fields["tokenizer.ggml.tokens"], model.fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in model.fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    for name, key in SPECIAL_TOKENS.items():
        settings[f"{name}_token"] = tokens[model.fields[f"tokenizer.ggml.{key}_token_id"]]
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(model.fields["tokenizer.chat_template"])


def _write_weights(path: Path, model: GgufModel) -> None:
    from safetensors.numpy import save_file

    counts = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    weights = {}
    for name, values in model.tensors.items():
        *block, kind, _ = name.split(".")
        rows = unpermute(values, model.fields[counts[kind]]) if kind in counts else values
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{TENSOR_NAMES[kind]}.weight"] = rows
    save_file(weights, path, metadata={"format": "pt"})


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the reordering of query and key rows in GGUF files.

    llama.cpp rotates neighbouring pairs, transformers the two halves of a head: row 2i + j of a head goes to row
    j · half + i. Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py, inverted.
    """
    import numpy as np

    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
