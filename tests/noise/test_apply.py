"""Noise on norms in memory: what is added, what comes back, and who is refused meanwhile."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lockstep.config.schema import Noise
from lockstep.errors import EngineError
from lockstep.models.weights import named_weights
from lockstep.noise.apply import NoisyNorms, is_noisy, noise_vector, require_clean
from lockstep.noise.targets import find_targets
from lockstep.sync.fingerprint import fingerprint
from lockstep.types import NormNoise
from tests.noise.families import tiny

PINNED = (-0.45026859641075134, 0.580232560634613, 0.5106865763664246, 0.04684868082404137)


def noise_on(model: nn.Module, sigma: float = 0.01, seed: int = 3) -> NormNoise:
    chosen = find_targets(model, Noise())
    return NormNoise(sigma, seed, chosen.names, chosen.scales)


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(model)}


def test_numbers_depend_on_seed_and_name_alone() -> None:
    assert noise_vector(7, "a", 4).tolist() == pytest.approx(
        [0.28955, 0.28955, 0.28955, 0.28955], abs=9
    )  # pinned below
    assert torch.equal(noise_vector(7, "a", 100)[:10], noise_vector(7, "a", 10))
    assert not torch.equal(noise_vector(7, "a", 10), noise_vector(7, "b", 10))
    assert not torch.equal(noise_vector(7, "a", 10), noise_vector(8, "a", 10))
    many = noise_vector(1, "x", 200_000)
    assert many.dtype == torch.float32
    assert abs(float(many.mean())) < 0.01
    assert abs(float(many.std()) - 1) < 0.01


def test_every_process_draws_the_same() -> None:
    known = [-1.0146151781082153, 0.3991695046424866, -0.709139883518219]  # of another process, on another day
    assert noise_vector(7, "model.norm.weight", 3).tolist() == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3Moe"])
def test_the_weights_are_clean_plus_noise_in_place_and_come_back_to_the_bit(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    before, places = copies(model), {name: tensor.data_ptr() for name, tensor in named_weights(model)}
    print_before = fingerprint(named_weights(model)).combined
    noise = noise_on(model)
    noise = replace(noise, scales=(2.0, *noise.scales[1:]))
    norms = NoisyNorms(model)
    outcome = norms.set(noise)
    assert outcome.norms == len(noise.targets)
    moved = total = 0.0
    for name, tensor in named_weights(model):
        assert tensor.data_ptr() == places[name]
        if name not in noise.targets:
            assert torch.equal(tensor, before[name])
            continue
        factor = 2.0 if name == noise.targets[0] else 1.0
        wanted = (before[name].float() + 0.01 * factor * noise_vector(3, name, tensor.numel())).to(dtype)
        assert torch.equal(tensor, wanted)
        moved += float((tensor.double() - before[name].double()).square().sum())
        total += float((before[name].double() + (1.0 if family == "Gemma2" else 0.0)).square().sum())
    assert outcome.share == pytest.approx(math.sqrt(moved / total))
    assert norms.set(None) == (0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_weights(model))
    assert fingerprint(named_weights(model)).combined == print_before


def test_setting_again_never_accumulates() -> None:
    once, often = tiny("Llama"), tiny("Llama")
    again, single = NoisyNorms(often), NoisyNorms(once)
    for seed in range(20):
        again.set(noise_on(often, 0.05, seed))
    single.set(noise_on(once, 0.05, 19))
    assert fingerprint(named_weights(once)).combined == fingerprint(named_weights(often)).combined


def test_the_output_of_the_model_changes_and_comes_back() -> None:
    model, ids = tiny("Llama"), torch.tensor([[3, 4, 5, 6]])
    norms = NoisyNorms(model)
    with torch.no_grad():
        clean = model(ids).logits
        norms.set(noise_on(model, 0.05))
        noisy = model(ids).logits
        norms.set(None)
        after = model(ids).logits
    assert (noisy - clean).abs().max() > 1e-3
    assert torch.equal(after, clean)


def test_it_is_noise_on_the_input_channels_of_the_matrices_behind() -> None:
    """RMSNorm(x; w + Z) Wᵀ = (x / rms ⊙ w) (W diag(1 + Z / w))ᵀ, the identity that QeRL rests on."""
    model = tiny("Llama")
    layer = model.model.layers[0]  # type: ignore[union-attr, index]
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    norm, weight = layer.input_layernorm, layer.self_attn.q_proj.weight.detach()
    clean = norm.weight.detach().clone()
    with torch.no_grad():
        plain = norm(x)
        norms = NoisyNorms(model)
        norms.set(noise_on(model, 0.02))
        z = norm.weight.detach() - clean
        noisy = norm(x) @ weight.T
        norms.set(None)
    assert torch.allclose(noisy, plain @ (weight * (1 + z / clean)).T, atol=1e-5)


def test_bf16_swallows_noise_that_is_small_against_the_weight() -> None:
    model = tiny("Llama").to(torch.bfloat16)
    norms = NoisyNorms(model)
    norms.set(noise_on(model, 1e-4))
    assert norms.lost > 0.9
    norms.set(noise_on(model, 0.1))
    assert norms.lost < 0.1
    norms.set(None)


def test_while_it_is_on_whoever_reads_the_same_memory_is_refused() -> None:
    model = tiny("Llama")
    alias = tiny("Llama")
    for one, other in zip(alias.parameters(), model.parameters(), strict=True):
        one.data = other.data
    norms = NoisyNorms(model)
    norms.set(noise_on(model))
    for watched in (model, alias):
        with pytest.raises(EngineError, match="an update was requested while the engine's noise is applied"):
            require_clean(watched, "an update")
    with pytest.raises(EngineError, match="the noise of another engine is applied"):
        NoisyNorms(alias).set(noise_on(alias))
    assert not is_noisy(tiny("Llama").parameters())
    norms.set(None)
    require_clean(alias, "an update")


def test_an_object_that_is_forgotten_leaves_clean_weights() -> None:
    model = tiny("Llama")
    before = fingerprint(named_weights(model)).combined
    norms = NoisyNorms(model)
    norms.set(noise_on(model))
    assert is_noisy(model.parameters())
    del norms
    gc.collect()
    assert not is_noisy(model.parameters())
    assert fingerprint(named_weights(model)).combined == before


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("model.layers.0.no_such_norm.weight",), "needs a weight of this name"),
        (("model.layers.0.mlp.up_proj.weight",), "not the weight of a norm"),
        ((), "is empty, or names one twice"),
        (("model.norm.weight", "model.norm.weight"), "or names one twice"),
    ],
)
def test_targets_that_cannot_be_are_refused_and_leave_the_weights_clean(targets: tuple[str, ...], said: str) -> None:
    model = tiny("Llama")
    before, norms = copies(model), NoisyNorms(model)
    norms.set(noise_on(model))
    with pytest.raises(EngineError, match=said):
        norms.set(NormNoise(0.01, 3, targets, (1.0,) * len(targets)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_weights(model))
    require_clean(model, "anything")
