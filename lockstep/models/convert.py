"""Converts a GGUF file (Llama, Qwen2, Qwen3) to a Hugging Face folder with fp32 safetensors. Does not import torch.

transformers can read GGUF files too, but its result differs from the published model:
 - it marks the model as quantised and refuses to save it, although the weights were dequantised;
 - its tokenizer ignores `tokenizer.ggml.pre`: without its split at digits, a blank or a line end before a number
   becomes a different token from the one in training;
 - rms_norm_eps comes back as 9.999999747378752e-06, the nearest fp32 of 1e-5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ModelError
from lockstep.models.gguf_facts import FAMILIES, HEAD_COUNTS, SPLITS, TENSOR_NAMES, unpermute

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONTROL_TOKEN, USER_TOKEN = 3, 4
"""gguf.TokenType.CONTROL, which text never becomes; USER_DEFINED, which is found in text before anything else."""

SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Hugging Face name → GGUF name."""

BOUNDARIES = ("bos", "eos", "pad")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Content of a GGUF file. Example: fields["llama.block_count"] == 30, number("block_count") == 30"""

    fields: Mapping[str, Any]
    tensors: Mapping[str, NDArray[np.float32]]
    """GGUF name → values, dequantised; rows × columns as in torch."""

    def number(self, name: str) -> Any:
        """Return a field of the model's own family."""
        return self.fields[f"{self.fields['general.architecture']}.{name}"]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer with chat template, and weights of `gguf` into the empty `folder`.

    Raises:
        ModelError: the file is not of a known family with a byte-level BPE tokenizer of a known kind.
    """
    model = read_gguf(gguf)
    _refuse_others(model, gguf)
    _write_json(folder / "config.json", config_of(model))
    _write_json(folder / "generation_config.json", boundary_ids(model))
    _write_tokenizer(folder, model)
    _write_weights(folder / "model.safetensors", model)


def read_gguf(path: Path) -> GgufModel:
    """Read all fields and dequantised tensors of a GGUF file."""
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError) as error:
        raise ModelError(
            f"the file cannot be read as GGUF: {error}", where=str(path), fix="download the file again"
        ) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return GgufModel(fields, {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors})


def _refuse_others(model: GgufModel, path: Path) -> None:
    known = {
        "general.architecture": tuple(FAMILIES),
        "tokenizer.ggml.model": ("gpt2",),
        "tokenizer.ggml.pre": tuple(SPLITS),
    }
    for name, values in known.items():
        if model.fields.get(name) not in values:
            raise ModelError(
                f"{name} is {model.fields.get(name)!r}; only {', '.join(map(repr, values))} can be converted",
                where=str(path),
                fix="use a model in safetensors format",
            )


def config_of(model: GgufModel) -> dict[str, object]:
    """Return config.json as transformers wants it."""
    number, family = model.number, model.fields["general.architecture"]
    heads, width = number("attention.head_count"), number("embedding_length")
    config = {
        "architectures": [FAMILIES[family].model_class],
        "model_type": family,
        "dtype": "float32",
        "vocab_size": len(model.fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": model.fields.get(f"{family}.rope.dimension_count", width // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": number("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": number("rope.freq_base")},
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        **boundary_ids(model),
    }
    if family == "qwen2":  # it has biases without saying so, and none of these settings
        for name in ("attention_bias", "mlp_bias", "head_dim"):
            del config[name]
    return config


def boundary_ids(model: GgufModel) -> dict[str, object]:
    """Return the content of generation_config.json: the ids that begin, end and pad."""
    fields = model.fields
    return {f"{name}_token_id": fields.get(f"tokenizer.ggml.{SPECIAL_TOKENS[name]}_token_id") for name in BOUNDARIES}


def _write_tokenizer(folder: Path, model: GgufModel) -> None:
    """Write a byte-level BPE tokenizer that splits text as `tokenizer.ggml.pre` says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    fields = model.fields
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    split = SPLITS[fields["tokenizer.ggml.pre"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(split.steps)
    tokenizer.decoder = decoders.ByteLevel()
    for special, wanted in ((True, CONTROL_TOKEN), (False, USER_TOKEN)):
        names = [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in names])
    if fields.get("tokenizer.ggml.add_bos_token"):
        _begin_with(tokenizer, tokens, fields["tokenizer.ggml.bos_token_id"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.number("context_length"),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    for name, key in SPECIAL_TOKENS.items():
        if (place := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            settings[f"{name}_token"] = tokens[place]
    _write_json(folder / "tokenizer_config.json", settings)
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, "utf-8")


def _pre_tokenizer(steps: Sequence[Mapping[str, Any]]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    made: list[Any] = []
    for step in steps:
        match step["type"]:
            case "Digits":
                made.append(pre_tokenizers.Digits(individual_digits=step["individual_digits"]))
            case "Split":
                made.append(pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), "isolated", invert=step["invert"]))
            case _:
                made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step["use_regex"]))
    return pre_tokenizers.Sequence(made)


def _begin_with(tokenizer: Any, tokens: Sequence[str], bos: int) -> None:
    """Put the token before every text."""
    from tokenizers import processors

    begin = tokens[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, bos)]
    )


def _write_weights(path: Path, model: GgufModel) -> None:
    from safetensors.numpy import save_file

    counts = HEAD_COUNTS if FAMILIES[model.fields["general.architecture"]].permuted else {}
    weights = {}
    for name, values in model.tensors.items():
        *block, kind, part = name.split(".")
        rows = unpermute(values, model.number(counts[kind])) if kind in counts else values
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{TENSOR_NAMES[kind]}.{part}"] = rows
    save_file(weights, path, metadata={"format": "pt"})


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
