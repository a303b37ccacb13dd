"""Writes a Hugging Face model folder as one GGUF file for llama.cpp: weights, config, tokenizer and chat template.

What the format cannot express is refused, never approximated. Sources: convert_hf_to_gguf.py and src/llama-vocab.cpp of
llama.cpp, and the gguf library, which writes the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.errors import ModelError
from lockstep.models.folder import read_json
from lockstep.models.gguf_facts import FAMILIES, HEAD_COUNTS, TENSOR_NAMES, find_split, permute

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""gguf.TokenType."""
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
"""gguf.LlamaFileType of files whose matrices have such numbers."""
QUANTIZATION = 2
"""gguf.GGML_QUANT_VERSION."""
FIX = "export with --format hf instead"


def write_gguf(folder: Path, path: Path, name: str = "") -> None:
    """Write the model in `folder` (config.json, safetensors, tokenizer.json) as the file `path`, numbers as they are.

    Matrices keep their precision; vectors are fp32, as llama.cpp wants them. One tensor is in memory at a time.

    Raises:
        ModelError: the family, a setting of its config, or the tokenizer cannot be expressed in the format.
    """
    from gguf import GGUFWriter

    config = _config(folder)
    vocabulary = _vocabulary(folder, config)
    writer = GGUFWriter(path, config.model_type)
    try:
        _add_config(writer, config, name or folder.name)
        _add_vocabulary(writer, vocabulary, folder)
        dtypes = {_add_tensor(writer, config, key, tensor) for key, tensor in folder_tensors(folder)} - {None}
        if len(dtypes) != 1 or (dtype := str(dtypes.pop())) not in FILE_TYPES:
            _refuse(folder, f"its matrices are not all in one of the formats {', '.join(FILE_TYPES)}")
        writer.add_file_type(FILE_TYPES[dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, tensor in folder_tensors(folder):
            writer.write_tensor_data(_values(config, key, tensor))
    finally:
        writer.close()


def _refuse(where: Path, what: str) -> NoReturn:
    raise ModelError(f"the model cannot be written as GGUF: {what}", where=str(where), fix=FIX)


# --- config ---------------------------------------------------------------------------------------------------------
def _config(folder: Path) -> Any:
    """Return config.json as transformers reads it. Raises ModelError for settings that would be lost."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in FAMILIES:
        _refuse(folder, f"its type is {config.model_type}, but only {', '.join(FAMILIES)} can be written")
    rope = config.rope_parameters
    wrong = {
        "rope_type": rope.get("rope_type", "default") != "default" and rope["rope_type"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0 and rope["partial_rotary_factor"],
        "hidden_act": config.hidden_act != "silu" and config.hidden_act,
        "attention_bias": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
    }
    if said := [f"{name} = {value}" for name, value in wrong.items() if value]:
        _refuse(folder / "config.json", f"GGUF cannot express {', '.join(said)}")
    return config


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_config(writer: GGUFWriter, config: Any, name: str) -> None:
    size = _head_size(config)
    writer.add_type("model")
    writer.add_quantization_version(QUANTIZATION)
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


# --- tokenizer ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    split: str
    begins: bool
    """Every text begins with the token that the tokenizer calls bos."""


def _vocabulary(folder: Path, config: Any) -> _Vocabulary:
    path = folder / "tokenizer.json"
    if not path.is_file():
        _refuse(folder, "tokenizer.json is missing")
    tokenizer = read_json(path)
    split = _require_known(tokenizer, path)
    tokens: dict[int, tuple[str, int]] = {i: (token, NORMAL) for token, i in tokenizer["model"]["vocab"].items()}
    for added in tokenizer.get("added_tokens", ()):
        if any(added.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            _refuse(path, f"the token {added['content']!r} strips spaces or matches whole words only")
        tokens[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    if max(tokens) >= config.vocab_size:
        _refuse(path, f"a token has the id {max(tokens)}, but the model has only {config.vocab_size} tokens")
    begins = _begins(folder, {token: i for i, (token, _) in tokens.items()})
    named = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(config.vocab_size)]
    return _Vocabulary(tuple(text for text, _ in named), tuple(kind for _, kind in named), split, begins)


def _require_known(tokenizer: Mapping[str, Any], path: Path) -> str:
    """Return the name of its split of text; all else must be byte-level BPE."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or (tokenizer.get("decoder") or {}).get("type") != "ByteLevel":
        _refuse(path, f"its tokenizer has the type {model.get('type')} and is not byte-level BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            _refuse(path, f"its tokenizer has {name} = {model[name]!r}")
    normalizer = tokenizer.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":  # llama.cpp has none: it takes text as NFC
        _refuse(path, f"its tokenizer has a normalizer of type {normalizer.get('type')}")
    split = find_split(tokenizer)
    if split is None:
        _refuse(path, "its tokenizer splits text before BPE in a way that llama.cpp has no name for")
    return split


def _begins(folder: Path, ids: Mapping[str, int]) -> bool:
    """Return whether a text begins with bos; refuse anything else around a text, and tokens whose ids change on loading."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if wrong := sorted(token for token, i in tokenizer.get_vocab().items() if ids.get(token) != i):
        _refuse(folder, f"{len(wrong)} tokens, such as {wrong[0]!r}, have other ids when loaded than in tokenizer.json")
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    if whole == bare:
        return False
    if tokenizer.bos_token_id is None or whole != [tokenizer.bos_token_id, *bare]:
        _refuse(folder, f"its tokenizer adds tokens other than one at the beginning: it turns {bare} into {whole}")
    return True


def _add_vocabulary(writer: GGUFWriter, vocabulary: _Vocabulary, folder: Path) -> None:
    from gguf import SpecialVocab

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    special = SpecialVocab(folder, load_merges=True, n_vocab=len(vocabulary.tokens))  # merges, ids, chat template
    special.add_special_token = {"bos": vocabulary.begins, "eos": False}
    special.add_to_gguf(writer, quiet=True)


# --- weights --------------------------------------------------------------------------------------------------------
def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder's model, one at a time."""
    from safetensors import safe_open

    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def _gguf_name(name: str) -> str:
    """Return a tensor's GGUF name. Example: "blk.3.attn_q.weight" of "model.layers.3.self_attn.q_proj.weight"."""
    short = {long: short for short, long in TENSOR_NAMES.items()}
    stem, _, part = name.rpartition(".")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, block, stem = stem.split(".", 3)
        prefix = f"blk.{block}."
    if stem not in short or part not in ("weight", "bias"):
        raise ModelError(f"the model cannot be written as GGUF: the format has no name for {name}", where=name, fix=FIX)
    return f"{prefix}{short[stem]}.{part}"


def _add_tensor(writer: GGUFWriter, config: Any, name: str, tensor: Tensor) -> str | None:
    """Announce a tensor; returns the precision of a matrix, None for a vector."""
    from gguf import GGMLQuantizationType

    values = _values(config, name, tensor)
    brain = values.dtype.name == "uint16"
    raw = GGMLQuantizationType.BF16 if brain else None
    writer.add_tensor_info(_gguf_name(name), values.shape, values.dtype, values.nbytes, raw)
    return None if values.ndim == 1 else "bfloat16" if brain else values.dtype.name


def _values(config: Any, name: str, tensor: Tensor) -> Any:
    """Return a tensor as the file holds it: rows reordered where the format wants that, bf16 as its bits."""
    import torch

    if tensor.ndim == 1:
        tensor = tensor.float()
    values = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    kind = _gguf_name(name).split(".")[-2]
    if FAMILIES[config.model_type].permuted and kind in HEAD_COUNTS:
        count = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
        values = permute(values, count)
    return values
