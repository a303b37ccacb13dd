"""Weights as a stream of names and tensors: names of the checkpoint, live tensors, and what cannot be loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from lockstep.config.schema import Lora
from lockstep.errors import SyncError
from lockstep.learner.adapter_files import Base
from lockstep.learner.adapters import attach
from lockstep.learner.merge import merged_weights
from lockstep.models.weights import clean_name, frozen_names, load_weights, named_weights
from lockstep.sync.fingerprint import fingerprint
from tests.learner.models import logprobs_of, plain, tokens


def adapted(seed: int = 0, family: str = "llama-tied") -> nn.Module:
    return attach(plain(family), Lora(rank=4, alpha=12, targets=["q_proj", "down_proj"]), seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt-oss"])
def test_names_are_those_of_the_checkpoint_and_tied_weights_come_once(family: str, tmp_path: Path):
    model: Any = plain(family)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    names = [name for name, _ in named_weights(model)]
    assert len(names) == len(set(names))
    assert set(names) == stored
    assert ("lm_head.weight" in names) == (family != "llama-tied")


def test_the_tensors_are_the_live_ones():
    model = plain("llama")
    parameters = dict(model.named_parameters())
    for name, tensor in named_weights(model):
        assert tensor.data_ptr() == parameters[name].data_ptr()
        assert not tensor.requires_grad


def test_the_order_is_that_of_torch_with_shared_and_absent_modules():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), nn.Linear(3, 2, bias=False))
    model.register_module("absent", None)
    model.add_module("again", model[1])
    model.add_module("tied", nn.Linear(3, 2))
    model.get_submodule("tied").weight = model[2].weight
    names = [name for name, _ in named_weights(model)]
    parameters = [name for name, _ in model.named_parameters()]
    assert [name for name in names if name in parameters] == parameters
    assert sorted(names) == sorted([*parameters, *(name for name, _ in model.named_buffers())])


def test_every_read_sees_the_model_as_it_is():
    model = adapted()
    layer: Any = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    name = "model.layers.1.self_attn.q_proj"

    def read() -> dict[str, torch.Tensor]:
        return dict(named_weights(model))

    before = read()
    layer.lora_A["default"].weight = nn.Parameter(torch.ones(4, 64))
    assert read()[f"{name}.lora_A"].eq(1).all()
    layer.scaling = {"default": 0.5}
    assert read()[f"{name}.lora_scaling"].tolist() == [0.5]
    layer.base_layer = nn.Linear(64, 64, bias=True)
    assert read().keys() - before.keys() == {f"{name}.bias"}
    layer.base_layer.register_buffer("extra", torch.ones(2))
    assert f"{name}.extra" in read()
    layer.base_layer._non_persistent_buffers_set.add("extra")
    assert f"{name}.extra" not in read()
    del layer.lora_B["default"]
    assert f"{name}.lora_B" not in read()
    with_two: Any = adapted()
    with_two.add_adapter("other", with_two.peft_config["default"])
    first = dict(named_weights(with_two))
    with_two.set_adapter("other")
    second = dict(named_weights(with_two))
    assert first.keys() == second.keys()
    assert first[f"{name}.lora_A"].data_ptr() != second[f"{name}.lora_A"].data_ptr()


def test_adapters_keep_the_bases_names_and_add_their_own():
    base = {name for name, _ in named_weights(plain("llama-tied"))}
    weights = dict(named_weights(adapted()))
    layers = [f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")]
    added = {f"{layer}.{what}" for layer in layers for what in ("lora_A", "lora_B", "lora_scaling")}
    assert set(weights) == base | added
    for layer in layers:
        scaling = weights[f"{layer}.lora_scaling"]
        assert scaling.tolist() == [3.0]
        assert scaling.dtype == torch.float64
        assert weights[f"{layer}.lora_A"].shape[0] == weights[f"{layer}.lora_B"].shape[1] == 4


def test_frozen_and_trainable_names_divide_the_parameters():
    model = adapted()
    trained = {name for name, _ in named_weights(model, trainable_only=True) if not name.endswith("lora_scaling")}
    frozen = frozen_names(model)
    assert all(".lora_" in name for name in trained)
    assert not any(".lora_" in name for name in frozen)
    assert trained | frozen == {clean_name(name) for name, _ in model.named_parameters()}
    assert frozen_names(plain("llama")) == frozenset()


def test_a_stream_makes_another_model_the_same():
    source, target = plain("llama", seed=0), plain("llama", seed=1)
    pointers = [parameter.data_ptr() for parameter in target.parameters()]
    taken = load_weights(target, named_weights(source))
    assert taken == [name for name, _ in source.named_parameters()]
    for (name, a), (_, b) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [parameter.data_ptr() for parameter in target.parameters()] == pointers, "copied in place"


@pytest.mark.parametrize("adapter", [False, True])
def test_a_stored_buffer_belongs_to_the_model(adapter: bool, tmp_path: Path):
    """Two models that differ in the correction of a router's scores alone answer differently: they are two models."""
    source: Any = plain("glm4-moe")
    target = copy.deepcopy(source)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    target.get_buffer(name).copy_(source.get_buffer(name).flip(0))
    ids = tokens(40, 1)
    assert (logprobs_of(source, ids) - logprobs_of(target, ids)).abs().mean() > 0.05
    assert Base.of(source, "one").fingerprint != Base.of(target, "other").fingerprint
    if adapter:
        settings: Any = Lora(rank=4, targets=["q_proj"])
        source, target = attach(source, settings, 0), attach(target, settings, 0)
    assert name in frozen_names(source)
    assert name not in dict(named_weights(source, trainable_only=True))
    assert fingerprint(named_weights(source)) != fingerprint(named_weights(target))
    load_weights(target, named_weights(source))
    assert fingerprint(named_weights(source)) == fingerprint(named_weights(target))
    assert torch.equal(logprobs_of(source, ids), logprobs_of(target, ids))
    assert name in dict(merged_weights(source))


def test_buffers_made_from_the_config_do_not():
    model = plain("llama")
    assert [name for name, _ in model.named_buffers()]
    assert {name for name, _ in named_weights(model)} == {name for name, _ in model.named_parameters()}


def test_a_stream_carries_adapters_and_their_scaling():
    source, target = adapted(0), adapted(1)
    for name, parameter in source.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    for module in source.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 0.75  # type: ignore[operator, index]
    load_weights(target, named_weights(source))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(source(input_ids=ids).logits, target(input_ids=ids).logits)
    ours, theirs = dict(named_weights(source)), dict(named_weights(target))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("model.norm.weights", torch.zeros(64), "the engine has no tensor of this name"),
        ("model.layers.0.self_attn.k_proj.lora_scaling", torch.ones(1), "the engine has no tensor of this name"),
        ("model.norm.weight", torch.zeros(63), r"sent is \(63,\) torch.float32, the engine's is \(64,\)"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.bfloat16), "sent is .* torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, tensor: torch.Tensor, told: str):
    with pytest.raises(SyncError, match=told) as caught:
        load_weights(adapted(), iter([(name, tensor)]))
    assert caught.value.where == name


def test_clean_names():
    assert clean_name("model.norm.weight") == "model.norm.weight"
    assert clean_name("base_model.model.model.norm.weight") == "model.norm.weight"
    inner = "base_model.model.model.layers.0.mlp.down_proj"
    assert clean_name(f"{inner}.base_layer.weight") == "model.layers.0.mlp.down_proj.weight"
    assert clean_name(f"{inner}.lora_A.default.weight") == "model.layers.0.mlp.down_proj.lora_A"
