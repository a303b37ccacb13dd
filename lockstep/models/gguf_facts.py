"""Names and layouts of llama.cpp's GGUF files: model families, tensors, tokenizers, row order, as convert.py reads and
gguf_writer.py writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Family:
    """A model family with the same name in GGUF (general.architecture) and in transformers (model_type)."""

    model_class: str
    permuted: bool = False
    """True if GGUF files have the rows of queries and keys in another order."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", permuted=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
}

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF name of a tensor, without block number and ".weight" or ".bias" → Hugging Face name."""

HEAD_COUNTS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""Tensors whose rows are permuted, and the field that counts their heads."""


# --- tokenizers -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Split:
    """Split of text before byte-level BPE, as in tokenizer.json."""

    steps: tuple[Mapping[str, Any], ...]
    ignore_merges: bool = False
    """True if a piece of text that is a token is not split further."""


def _regex(pattern: str) -> tuple[Mapping[str, Any], ...]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return cut, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPLITS = {
    "gpt-2": Split((_GPT2,)),
    "smollm": Split(({"type": "Digits", "individual_digits": True}, _GPT2)),
    "qwen2": Split(_regex(_WORDS + r"\p{N}" + _REST)),
    "llama-bpe": Split(_regex(_WORDS + r"\p{N}{1,3}" + _REST), ignore_merges=True),
}
"""tokenizer.ggml.pre → the same in tokenizer.json. Source: regex_exprs in llama.cpp's src/llama-vocab.cpp."""


def find_split(tokenizer: Mapping[str, Any]) -> str | None:
    """Return the name in SPLITS of a tokenizer.json's split; None if it has none."""
    given = tokenizer.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers") if given.get("type") == "Sequence" else [given]
    # trim_offsets moves no boundary between tokens.
    plain = tuple({key: value for key, value in step.items() if key != "trim_offsets"} for step in steps or [])
    wanted = Split(plain, bool(tokenizer["model"].get("ignore_merges")))
    return next((name for name, split in SPLITS.items() if split == wanted), None)


# --- rows -----------------------------------------------------------------------------------------------------------
def permute(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder the rows of a query or key matrix as GGUF files of a Llama have them; the inverse of `unpermute`."""
    import numpy as np

    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape))


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the reordering of query and key rows in GGUF files.

    llama.cpp rotates neighbouring pairs, transformers the two halves of a head: row 2i + j of a head goes to row
    j · half + i. Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py, inverted.
    """
    import numpy as np

    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))
