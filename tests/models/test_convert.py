from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.errors import ModelError
from lockstep.models.convert import convert_gguf
from lockstep.models.gguf_facts import TENSOR_NAMES, unpermute
from tests.tiny import SPECIAL_TOKENS, TEMPLATE, write_tiny_model

HEADS, KV_HEADS = 4, 2


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py reorders q and k: the inverse of what is tested."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(folder: Path, path: Path, *, architecture: str = "llama", pre: str = "smollm") -> None:
    """The tiny Hugging Face model of `folder` as a GGUF file, as llama.cpp would write it."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    short = {long: name for name, long in TENSOR_NAMES.items()}
    for name, values in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, block, kind = stem.split(".", 3)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(kind)
            writer.add_tensor(f"blk.{block}.{short[kind]}.weight", permute(values, heads) if heads else values)
        else:
            writer.add_tensor(f"{short[stem]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_unpermute_puts_neighbours_into_halves() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)  # two heads of four rows
    assert unpermute(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    values = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
    assert np.array_equal(unpermute(permute(values, 3), 3), values)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_comes_back_bit_equal_with_its_tokenizer(tmp_path: Path, tied: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write_tiny_model(source, tied=tied)
    write_gguf(source, tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", target)

    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) is not tied
    for name in before:
        assert np.array_equal(before[name], after[name]), name

    old, new = AutoModelForCausalLM.from_pretrained(source).config, AutoModelForCausalLM.from_pretrained(target).config
    for name in (
        "hidden_size",
        "head_dim",
        "num_key_value_heads",
        "rope_parameters",
        "tie_word_embeddings",
        "eos_token_id",
    ):
        assert getattr(old, name) == getattr(new, name), name
    assert new.rms_norm_eps == 1e-5

    old_tokenizer, new_tokenizer = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(target)
    text = "State the  4\n\n12 + 3 =<|im_end|> Ünï 日本"
    assert new_tokenizer.encode(text) == old_tokenizer.encode(text)
    assert new_tokenizer.eos_token_id == 2
    chat = [{"role": "user", "content": "4 + 3 ="}]
    assert new_tokenizer.apply_chat_template(chat, tokenize=False) == old_tokenizer.apply_chat_template(
        chat, tokenize=False
    )


@pytest.mark.parametrize(("architecture", "pre"), [("falcon", "smollm"), ("llama", "tekken")])
def test_other_models_are_refused(tiny_model_dir: Path, tmp_path: Path, architecture: str, pre: str) -> None:
    write_gguf(tiny_model_dir, tmp_path / "model.gguf", architecture=architecture, pre=pre)
    with pytest.raises(ModelError, match=architecture if pre == "smollm" else pre):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        convert_gguf(tmp_path / "model.gguf", tmp_path)
