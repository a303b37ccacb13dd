from __future__ import annotations

import json
import logging
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.models import ResolvedModel, load_model, load_tokenizer, resolve, resolve_dtype
from lockstep.models.attention import NAME as REGISTERED
from lockstep.plan.model_shape import meta_model


@pytest.fixture
def resolved(tiny_model_dir: Path, tmp_path: Path) -> ResolvedModel:
    """A copy of the tiny model that a test may spoil."""
    return resolve(Model(path=shutil.copytree(tiny_model_dir, tmp_path / "model").as_posix()))


def rewrite(path: Path, **entries: object) -> None:
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_the_dtype_and_the_files_values(resolved: ResolvedModel, dtype: torch.dtype) -> None:
    model = load_model(resolved, dtype=dtype)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}, "rotary frequencies must not be rounded"
    files = load_file(resolved.path / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, files[name].to(dtype)), name
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight, "the tie is gone"


def test_attention_is_the_one_asked_for(resolved: ResolvedModel) -> None:
    assert load_model(resolved, dtype=torch.float32).config._attn_implementation == "sdpa"
    assert load_model(resolved, dtype=torch.float32, attention="eager").config._attn_implementation == "eager"
    assert load_model(resolved, dtype=torch.float32, attention=REGISTERED).config._attn_implementation == REGISTERED
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(resolved, dtype=torch.float32, attention="no_such_attention")


@pytest.mark.parametrize("value", ["flash_attention_2", "some-org/some-kernels", {"": "eager"}, 3])
@pytest.mark.parametrize("name", ["_attn_implementation", "_experts_implementation", "_attn_implementation_internal"])
def test_what_config_json_says_of_it_never_matters(resolved: ResolvedModel, name: str, value: object) -> None:
    rewrite(resolved.path / "config.json", **{name: value})
    assert meta_model(resolved.path).config.model_type == "llama"
    model = load_model(resolved, dtype=torch.float32, attention=REGISTERED)
    assert model.config._attn_implementation == REGISTERED


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1e\+09"),
        ({"text_config": {"num_layers": 10**9}}, r"num_layers = 1e\+09"),
        ({"num_local_experts": 10**9}, r"num_local_experts = 1e\+09"),
    ],
)
def test_numbers_without_end_are_refused_before_anything_is_made(
    resolved: ResolvedModel, entries: dict[str, object], says: str
) -> None:
    rewrite(resolved.path / "config.json", **entries)
    with pytest.raises(ModelError, match=says):
        resolve(Model(path=str(resolved.path)))


@pytest.mark.parametrize("entries", [{"vocab_size": 10**10}, {"hidden_size": 2**20}, {"intermediate_size": 10**12}])
def test_sizes_that_no_file_holds_take_no_memory(resolved: ResolvedModel, entries: dict[str, object]) -> None:
    rewrite(resolved.path / "config.json", **entries)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"config.json describes [\d,]+ parameters, but the weight files hold [\d,]+"):
        load_model(resolved, dtype=torch.float32)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_missing_tensor_is_an_error_not_a_random_one(resolved: ResolvedModel) -> None:
    weights = load_file(resolved.path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, resolved.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensor \(model.layers.1.mlp.up_proj.weight\) missing"):
        load_model(resolved, dtype=torch.float32)


def test_a_tensor_of_another_shape_is_an_error(resolved: ResolvedModel) -> None:
    rewrite(resolved.path / "config.json", intermediate_size=96)
    with pytest.raises(ModelError, match=r"6 tensors \(model.layers.0.mlp.down_proj.weight.* of another shape"):
        load_model(resolved, dtype=torch.float32)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"hidden_act": "zzz"}, "cannot be loaded"),
        ({"num_hidden_layers": "two"}, "describes no model that transformers can build"),
        ({"model_type": "own"}, "describes no model that transformers can build"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_an_error(
    resolved: ResolvedModel, entry: dict[str, object], said: str
) -> None:
    rewrite(resolved.path / "config.json", **entry)
    with pytest.raises(ModelError, match=said) as caught:
        load_model(resolved, dtype=torch.float32)
    assert "\n" not in caught.value.what


def test_a_tensor_that_no_parameter_takes_is_reported(
    resolved: ResolvedModel, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(resolved.path / "model.safetensors") | {"model.extra.weight": torch.zeros(2)}
    save_file(weights, resolved.path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        load_model(resolved, dtype=torch.float32)
    assert "1 tensor (model.extra.weight)" in caplog.text


def test_damaged_weights_are_an_error_that_names_the_folder(resolved: ResolvedModel) -> None:
    (resolved.path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelError, match="header of the weight file cannot be read") as caught:
        load_model(resolved, dtype=torch.float32)
    assert caught.value.where == str(resolved.path / "model.safetensors")


def test_loading_prints_nothing_and_leaves_the_settings_of_transformers(
    resolved: ResolvedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.logging.enable_progress_bar()
    level = transformers.logging.get_verbosity()
    load_model(resolved, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.is_progress_bar_enabled()
    assert transformers.logging.get_verbosity() == level


def test_the_tokenizer_pads_left_and_has_the_template(resolved: ResolvedModel) -> None:
    tokenizer = load_tokenizer(resolved)
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template.startswith("{% for message in messages %}")
    assert tokenizer(["4", "4 + 3"], padding=True)["input_ids"][0][0] == tokenizer.pad_token_id


def test_a_missing_pad_token_is_the_end_token_and_a_missing_end_token_an_error(resolved: ResolvedModel) -> None:
    settings = resolved.path / "tokenizer_config.json"
    rewrite(settings, pad_token=None)
    assert load_tokenizer(resolved).pad_token == "<|im_end|>"
    rewrite(settings, eos_token=None)
    with pytest.raises(ModelError, match="no end token"):
        load_tokenizer(resolved)


def test_a_tokenizer_that_cannot_be_read_is_an_error(resolved: ResolvedModel) -> None:
    (resolved.path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be read"):
        load_tokenizer(resolved)


def test_auto_dtype_is_fp32_on_cpu_and_bf16_on_a_gpu() -> None:
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", torch.device("cuda", 1)) == torch.bfloat16
    assert resolve_dtype("bf16", "cpu") == torch.bfloat16
    assert resolve_dtype("fp32", "cuda") == torch.float32
