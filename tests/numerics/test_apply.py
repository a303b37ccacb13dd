"""Which layers are quantised, and that their copies are never stale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.schema import Lora
from lockstep.errors import EngineError, LearnerError, ModelError
from lockstep.learner.adapters import attach
from lockstep.models.weights import load_weights, named_weights
from lockstep.numerics.apply import ModelNumerics, numerics_of, operands
from lockstep.numerics.formats import fake_quantise
from lockstep.numerics.linear import Quantiser
from tests.learner.models import logits_of, plain, tokens, twin
from tests.numerics.models import LAYERS, quantised_reference

IDS = tokens(40, 1)
W4A4 = Quantiser("mxfp4-w4a4")


def settled(model: nn.Module, numeric: str = "mxfp4-w4a4", **settings: Any) -> ModelNumerics:
    numerics = numerics_of(model, **settings)
    numerics.settle(numeric)
    return numerics


@pytest.mark.parametrize("numeric", ["mxfp4-w4a4", "mxfp4-w4a16", "nvfp4-w4a4", "nvfp4-w4a16"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "gemma2"])
def test_a_quantised_model_is_the_one_written_out(family: str, numeric: str):
    model = plain(family)
    expected = logits_of(quantised_reference(model, numeric), IDS)
    before = logits_of(model, IDS)
    assert settled(model, numeric).prepare(numeric) == 14
    torch.testing.assert_close(logits_of(model, IDS), expected, rtol=1e-5, atol=1e-5)
    assert (logits_of(model, IDS) - before).abs().max() > 1e-2
    numerics_of(model).settle("")
    assert torch.equal(logits_of(model, IDS), before)


def test_a_numeric_ends_with_its_block():
    model = plain("llama")
    before, numerics = logits_of(model, IDS), numerics_of(model)
    numerics.prepare("mxfp4-w4a4")
    with numerics.computing("mxfp4-w4a4"):
        assert not torch.equal(logits_of(model, IDS), before)
        with numerics.computing(""):
            assert torch.equal(logits_of(model, IDS), before)
        assert not torch.equal(logits_of(model, IDS), before)
    assert torch.equal(logits_of(model, IDS), before)


def test_targets_are_counted_once_with_adapters_too():
    """A layer under PEFT is a wrapper and what it wraps: both would be twice the layers."""
    names = {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in _parts()}
    assert set(numerics_of(plain("llama")).targets) == names
    adapted = attach(twin(plain("llama-tied")), Lora(rank=4), 0)  # type: ignore[arg-type]
    assert set(numerics_of(adapted).targets) == names
    assert numerics_of(adapted) is numerics_of(adapted.get_base_model())  # type: ignore[operator]
    assert "lm_head" in numerics_of(adapted).excluded


def _parts() -> list[str]:
    return [f"self_attn.{name}" if name[0] in "qkvo" else f"mlp.{name}" for name in LAYERS]


def test_exclusions():
    model = plain("llama")
    numerics = numerics_of(model, exclude=["down_proj", "layers.0", "model.layers.1.self_attn.o_proj"])
    assert set(numerics.targets) == {
        f"model.layers.1.{p}" for p in _parts() if p not in ("mlp.down_proj", "self_attn.o_proj")
    }
    kept = [name for name in LAYERS if name != "down_proj"]
    other = plain("llama")
    settled(other, exclude=["down_proj"])
    expected = logits_of(quantised_reference(plain("llama"), "mxfp4-w4a4", names=kept), IDS)
    torch.testing.assert_close(logits_of(other, IDS), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="'proj' names no linear layer"):
        numerics_of(plain("llama"), exclude=["proj"])


def test_routers_and_their_gates_stay():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.router, self.gate_proj = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

    model: Any = nn.Module()
    model.decoder, model.lm_head = Block(), nn.Linear(8, 8)
    model.get_decoder = lambda: model.decoder
    assert list(numerics_of(model).targets) == ["decoder.gate_proj"]


def test_no_layer_is_an_error():
    model = plain("llama")
    numerics = numerics_of(model, exclude=["layers"])
    with pytest.raises(LearnerError, match="quantise no layer"):
        numerics.settle("mxfp4-w4a4")
    with pytest.raises(EngineError, match="quantise no layer"):
        numerics.serve("mxfp4-w4a4")
    assert numerics.serve("") == 0


# --- staleness ------------------------------------------------------------------------------------------------------
def first(model: nn.Module) -> Any:
    return model.model.layers[0].self_attn.q_proj  # type: ignore[union-attr, index]


def is_fresh(model: nn.Module) -> bool:
    layer = first(model)
    used = operands(layer, torch.ones(1, layer.in_features))
    assert used is not None
    return torch.equal(used[1], fake_quantise(layer.weight.detach(), "mxfp4"))


def test_a_copy_follows_every_write_that_torch_counts():
    model = plain("llama")
    numerics = settled(model)
    assert is_fresh(model)
    layer = first(model)
    address = numerics.weight(W4A4, layer).data_ptr()
    with torch.no_grad():
        layer.weight.mul_(3)
    assert is_fresh(model)
    load_weights(model, iter((n, t * 2) for n, t in list(named_weights(plain("llama", seed=5)))))
    assert is_fresh(model)
    layer.weight.data = layer.weight.data * 0.3
    assert is_fresh(model)
    assert numerics.weight(W4A4, layer).data_ptr() == address


def test_torchs_fused_adamw_is_not_counted_so_the_learner_says_so():
    """Once it is, `changed` may go. TorchLearner.update calls it: tests/learner/test_numerics.py."""
    model = plain("llama")
    numerics = settled(model)
    is_fresh(model)
    weight = first(model).weight
    weight.grad = torch.ones_like(weight)
    before, count = weight.detach().clone(), weight._version
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    assert not torch.equal(before, weight)
    assert weight._version == count
    numerics.changed()
    assert is_fresh(model)


def test_a_write_past_torch_is_found():
    model = plain("llama")
    numerics = settled(model)
    is_fresh(model)
    assert numerics.verify() == 1
    first(model).weight.data.mul_(3)
    with pytest.raises(
        EngineError,
        match=r"model.layers.0.self_attn.q_proj: the layer's quantised copy differs from its weight",
    ):
        numerics.verify()
    numerics.changed()  # what the learner says after its own step
    assert is_fresh(model)
    assert numerics.verify() == 1


def test_joined_weights_are_parts_of_one_tensor_and_follow():
    model = plain("llama")
    numerics = settled(model, "nvfp4-w4a4")
    attention = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    quantiser = Quantiser("nvfp4-w4a4")
    whole = numerics.joined(quantiser, layers)
    assert torch.equal(whole, torch.cat([fake_quantise(layer.weight.detach(), "nvfp4") for layer in layers]))
    with torch.no_grad():
        attention.k_proj.weight.mul_(2)
    numerics.refresh("nvfp4-w4a4")
    assert numerics.joined(quantiser, layers) is whole
    assert torch.equal(whole, torch.cat([fake_quantise(layer.weight.detach(), "nvfp4") for layer in layers]))


def test_inputs_are_shared_only_while_they_are_what_they_were():
    model = plain("llama")
    settled(model)
    layer, x = first(model), torch.randn(3, 64)
    used = operands(layer, x)
    again = operands(layer, x)
    assert used is not None
    assert again is not None
    assert again[0] is used[0]
    x.mul_(5)
    fresh = operands(layer, x)
    assert fresh is not None
    assert torch.equal(fresh[0], fake_quantise(x, "mxfp4"))


def test_a_copy_of_the_model_has_its_own():
    model = plain("llama")
    settled(model)
    other = copy.deepcopy(model)
    assert numerics_of(other) is not numerics_of(model)
    with torch.no_grad():
        first(other).weight.mul_(3)
    assert is_fresh(other)
    assert is_fresh(model)
    numerics_of(other).settle("")
    assert torch.equal(logits_of(model, IDS), logits_of(quantised_twin(), IDS))


def quantised_twin() -> nn.Module:
    model = plain("llama")
    settled(model)
    return model
