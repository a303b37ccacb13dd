"""Sizes read from config.json against the real modules of transformers, built without memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from lockstep.errors import ModelError
from lockstep.models.stored import stored_parameters
from lockstep.plan.model_shape import measured_shape, read_shape
from lockstep.plan.modules import shape_of_model
from lockstep.plan.shapes import FAMILIES, ModelShape, shape_of

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

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("Mistral", {"sliding_window": 8}),
    ("Mixtral", EXPERTS),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 32}),
    ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}),
    ("Gemma", {"head_dim": 32}),
    ("Gemma2", {"head_dim": 32}),
    ("Gemma3Text", {"head_dim": 32}),
    ("GptOss", {"head_dim": 32} | EXPERTS),
    ("Granite", {}),
    ("SmolLM3", {}),
]


def _config(name: str, more: dict[str, Any]) -> Any:
    return getattr(hf, f"{name}Config")(**(SIZES | more))


def _meta(config: Any) -> Any:
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("name", "more"), VARIANTS)
def test_a_shape_from_the_config_is_that_of_the_modules(name: str, more: dict[str, Any]) -> None:
    config = _config(name, more)
    assert shape_of(config.to_dict()) == shape_of_model(_meta(config))


def test_every_family_is_covered() -> None:
    assert {_config(name, more).model_type for name, more in VARIANTS} == set(FAMILIES)


def test_known_sizes_of_published_models() -> None:
    qwen = {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 32768,
    }
    shape = shape_of(qwen)
    assert shape is not None
    assert shape.parameters == 1_543_714_304  # as the model card of Qwen2.5-1.5B says: 1.54B
    assert (shape.head_dim, shape.window, shape.kv_bytes()) == (128, None, 28672)
    assert shape.body + shape.head == 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960) + 1536 * 151936
    assert shape.adapter_parameters(32) == 28 * 32 * (4 * 1536 + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert shape.adapter_parameters(8, ["q_proj"]) == 28 * 8 * 2 * 1536


def test_experts_are_read_only_as_far_as_tokens_reach_them() -> None:
    shape = shape_of(
        _config("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}).to_dict()
    )
    assert shape is not None
    assert shape.body_bytes(1) == 2 * shape.body
    assert shape.body_bytes(2) - 2 * shape.body == 2 * 3 * 3 * (
        3 * 64 * 20
    )  # layers × further experts × matrices of one
    assert shape.body_bytes(1000) == shape.body_bytes(3)


def test_a_known_model_is_read_without_torch(tiny_model_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lockstep.plan.model_shape import read_shape; "
        f"print(read_shape(Path({str(tiny_model_dir)!r})).parameters); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert int(done.stdout) == sum(p.numel() for p in model.parameters())


def test_an_unknown_family_is_built_without_memory(tmp_path: Path) -> None:
    config = hf.StarCoder2Config(**SIZES) if hasattr(hf, "StarCoder2Config") else hf.Starcoder2Config(**SIZES)
    config.save_pretrained(tmp_path)
    assert shape_of(config.to_dict()) is None
    shape = read_shape(tmp_path)
    assert shape.parameters == sum(p.numel() for p in _meta(config).parameters())
    assert shape.hidden == 64
    assert {linear.name for linear in shape.linears} == {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"}


def test_experts_in_some_layers_only_are_counted_by_their_modules(tmp_path: Path) -> None:
    more = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "mlp_only_layers": [0]}
    config = _config("Qwen3Moe", more)
    config.save_pretrained(tmp_path)
    assert read_shape(tmp_path).parameters == sum(p.numel() for p in _meta(config).parameters())


def test_headers_of_the_files_are_compared(tmp_path: Path) -> None:
    config = _config("Qwen2", {"tie_word_embeddings": True})
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    shape = shape_of(config.to_dict())
    assert shape is not None
    assert stored_parameters(tmp_path) == shape.parameters
    assert read_shape(tmp_path) == shape


def test_a_config_that_lies_about_its_family_is_found_out(tmp_path: Path) -> None:
    """Another tensor count in the files than the config's words give: the modules decide."""
    config = _config("Qwen3", {"head_dim": 32})
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    words = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(words | {"num_hidden_layers": 2, "layer_types": None}))
    assert read_shape(tmp_path) == measured_shape(tmp_path)


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    config = _config("Qwen2", {})
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_shape(tmp_path)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(tmp_path)


def test_no_decoder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match="transformers cannot build a model"):
        read_shape(tmp_path)


def test_bytes_per_token_are_of_all_layers() -> None:
    shape = ModelShape("llama", 8, 3, 4, 2, 2, 16, 100, False, 0, ())
    assert shape.kv_bytes(2) == 2 * 3 * 2 * 2 * 2
