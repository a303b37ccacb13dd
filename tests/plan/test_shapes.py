"""Sizes that are read from the modules of transformers, built without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from lockstep.errors import ModelError
from lockstep.models.stored import stored_parameters
from lockstep.plan.model_shape import read_shape, shape_of_model
from lockstep.plan.shapes import ModelShape
from tests.plan.test_floors import SMALL

SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}

MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
WIDE: dict[str, Any] = {"head_dim": 32}


def _config(name: str, more: dict[str, Any]) -> Any:
    return getattr(hf, f"{name}Config")(**(SIZES | more))


def _meta(config: Any) -> Any:
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        (
            "Llama",
            {"tie_word_embeddings": True, "head_dim": 24},
            {"tied": True, "head_dim": 24, "norms": 2, "experts": 0},
        ),
        ("Mistral", {"sliding_window": 8}, {"window": 8, "windowed": 3, "tied": False}),
        ("Mixtral", EXPERTS, {"experts": 6, "experts_per_token": 2, "grouped": True, "intermediate": 100}),
        ("Qwen2", {"sliding_window": 8}, {"window": None, "windowed": 0, "qk_norm": False}),
        ("Qwen3", WIDE, {"qk_norm": True, "head_dim": 32, "kv_heads": 2}),
        ("Qwen3Moe", MOE, {"experts": 8, "experts_per_token": 3, "intermediate": 20, "qk_norm": True}),
        ("Gemma2", WIDE, {"norms": 4, "softcap": True, "window": 4096, "windowed": 2, "tied": True}),
        ("Gemma3Text", WIDE, {"norms": 4, "qk_norm": True, "softcap": False, "windowed": 3}),
        ("GptOss", WIDE | EXPERTS, {"sinks": True, "experts": 6, "grouped": True, "window": 128, "windowed": 2}),
    ],
)
def test_what_is_read_of_each_family(name: str, more: dict[str, Any], expected: dict[str, object]) -> None:
    shape = shape_of_model(_meta(_config(name, more)))
    assert {name: getattr(shape, name) for name in expected} == expected


def test_known_sizes_of_published_models() -> None:
    assert SMALL.parameters == 1_543_714_304  # as the model card of Qwen2.5-1.5B says: 1.54B
    assert (SMALL.head_dim, SMALL.window, SMALL.kv_bytes()) == (128, None, 28672)
    assert SMALL.body + SMALL.head == 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960) + 1536 * 151936
    assert SMALL.adapter_parameters(32) == 28 * 32 * (4 * 1536 + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert SMALL.adapter_parameters(8, ["q_proj"]) == 28 * 8 * 2 * 1536


def test_experts_are_read_only_as_far_as_tokens_reach_them() -> None:
    shape = shape_of_model(_meta(_config("Qwen3Moe", MOE)))
    assert shape.body_bytes(1) == 2 * shape.body
    assert shape.body_bytes(2) - 2 * shape.body == 2 * 3 * 3 * (
        3 * 64 * 20
    )  # layers × further experts × matrices of one
    assert shape.body_bytes(1000) == shape.body_bytes(3)


def test_a_folder_is_read_without_memory_for_weights(tmp_path: Path) -> None:
    config = hf.Starcoder2Config(**SIZES)
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.parameters == sum(p.numel() for p in _meta(config).parameters())
    assert shape.hidden == 64
    assert {linear.name for linear in shape.linears} == {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"}


def test_experts_in_some_layers_only_are_counted_by_their_modules() -> None:
    model = _meta(_config("Qwen3Moe", MOE | {"mlp_only_layers": [0]}))
    shape = shape_of_model(model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert len(shape.every_linear) == 3 * 4 + 3  # attention of all layers, and one plain MLP


@pytest.mark.parametrize(
    ("family", "chosen", "width"),
    [("Ernie4_5_Moe", "moe_k", "moe_intermediate_size"), ("AriaText", "moe_topk", "intermediate_size")],
)
def test_experts_are_counted_in_the_familys_own_words(family: str, chosen: str, width: str) -> None:
    shape = shape_of_model(_meta(_config(family, {"moe_num_experts": 6, chosen: 3, width: 32})))
    assert (shape.experts, shape.experts_per_token, shape.intermediate) == (6, 3, 32)


@pytest.mark.parametrize("family", ["GPTBigCode", "CTRL"])
def test_layers_may_be_called_h(family: str) -> None:
    model = _meta(getattr(hf, f"{family}Config")(n_layer=3, n_head=4, n_embd=64, vocab_size=100))
    shape = shape_of_model(model)
    assert (shape.layers, shape.hidden, len(shape.all_linears)) == (3, 64, 3 * len(shape.linears))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_headers_of_the_files_are_counted(tmp_path: Path) -> None:
    config = _config("Qwen2", {"tie_word_embeddings": True})
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert stored_parameters(tmp_path) == read_shape(tmp_path).parameters


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    config = _config("Qwen2", {})
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_shape(tmp_path)


def test_a_download_that_broke_off_is_named_with_its_bytes(tmp_path: Path) -> None:
    hf.AutoModelForCausalLM.from_config(_config("Qwen2", {})).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=f"cut off: it has {len(whole) - 100:,} of {len(whole):,} bytes"):
        read_shape(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_of_which_the_config_says_nothing_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    model = hf.AutoModelForCausalLM.from_config(_config("Qwen2", {}))
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = dict(model.state_dict()) | {"mask": torch.ones(2, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_shape(tmp_path).hidden == model.config.hidden_size
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} is stored as "):
        read_shape(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, ["a"], {"a": 3}])
def test_an_index_without_a_map_of_files_is_named(tmp_path: Path, weight_map: object) -> None:
    _config("Qwen2", {}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="no valid weight_map"):
        read_shape(tmp_path)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(tmp_path)


def test_no_decoder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match="describes no model that transformers can build"):
        read_shape(tmp_path)


def test_bytes_per_token_are_of_all_layers() -> None:
    shape = ModelShape(8, 3, 4, 2, 2, 16, 100, False, 0, ())
    assert shape.kv_bytes(2) == 2 * 3 * 2 * 2 * 2
