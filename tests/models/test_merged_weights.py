"""Layers that compute with their adapter merged in: outputs and gradients, when the weight is made again, and engines over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.adapter import Lora
from lockstep.learner.adapters import as_reference, attach
from lockstep.learner.lora_linear import LoraLinear
from lockstep.learner.merge import merged_weights
from lockstep.models.low_rank import STEPS, Merge, dither_into, merge
from lockstep.models.merged_weights import merged_of, separate
from lockstep.models.weights import clean_name, named_weights
from lockstep.rollout.native import NativeEngine
from lockstep.sync.merged import merged
from lockstep.types import Request, Sampling
from tests.interpreter import interpreted
from tests.learner.models import FAMILIES, logits_of, logprobs_of, plain
from tests.rollout.paged.test_engine import paged_over
from tests.sync.test_merged import IDS, jolt, llama

NAME = "lockstep"


def adapted(*, merged: bool = True, dtype: torch.dtype = torch.float32, attention: str = NAME) -> nn.Module:
    """A model whose adapters do something."""
    model = attach(llama(dtype=dtype, attention=attention), Lora(rank=4, alpha=8, merged=merged), 0)  # type: ignore[arg-type]
    jolt(model, 1)
    return model


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


@pytest.mark.parametrize("together", [False, True])
def test_outputs_and_gradients_are_those_of_separate_products(together: bool) -> None:
    one, other = adapted(), adapted(merged=False)
    own, theirs = ([layer for layer in layers_of(m) if layer.in_features == 32][:3] for m in (one, other))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    used, plain = (x.clone().requires_grad_() for _ in range(2))
    found = LoraLinear.together(own, used) if together else tuple(layer(used) for layer in own)
    assert found is not None
    wanted = tuple(layer(plain) for layer in theirs)
    mixes = [torch.randn(out.shape, generator=torch.Generator().manual_seed(i)) for i, out in enumerate(wanted)]
    for outputs in (found, wanted):
        sum((out * mix).sum() for out, mix in zip(outputs, mixes, strict=True)).backward()  # type: ignore[union-attr]
    for out, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(used.grad, plain.grad, atol=1e-5, rtol=1e-5)
    for layer, right in zip(own, theirs, strict=True):
        for kind in ("lora_A", "lora_B"):
            gradients = (getattr(each, kind)["default"].weight.grad for each in (layer, right))
            torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
        assert layer.base_layer.weight.grad is None


@pytest.mark.parametrize("together", [False, True])
def test_a_layer_multiplies_by_its_merged_weight_alone(together: bool) -> None:
    layers = layers_of(adapted(dtype=torch.bfloat16))[:3]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(6)).bfloat16()
    found = LoraLinear.together(layers, x) if together else [layer(x) for layer in layers]
    assert found is not None
    whole = torch.cat([layer.merged_weight.weight() for layer in layers])
    wanted = nn.functional.linear(x, whole).split([layer.out_features for layer in layers], 1)
    for layer, out, right in zip(layers, found, wanted, strict=True):
        alone = nn.functional.linear(x, layer.merged_weight.weight())
        assert torch.equal(out, right if together else alone)
        separate_products = layer.base_layer(x) + 2 * layer.lora_B["default"](layer.lora_A["default"](x))
        assert not torch.equal(out, separate_products)


def test_the_weight_is_the_rounded_sum_and_follows_the_adapter_in_its_place() -> None:
    model = adapted(dtype=torch.bfloat16)
    layer = layers_of(model)[0]
    kept, at = layer.merged_weight, layer.merged_weight.tensor.data_ptr()
    for write in (lambda: jolt(model, 3), lambda: layer.scaling.update(default=0.25)):
        before = kept.weight().clone()
        write()
        a, b = (getattr(layer, kind)["default"].weight.detach() for kind in ("lora_A", "lora_B"))
        wide = layer.base_layer.weight.double() + layer.scaling["default"] * b.double() @ a.double()
        assert bool(((kept.weight() - wide).abs() < 2**-7 * wide.abs()).all())
        given = "", layer.base_layer.weight, a, b, layer.scaling["default"]
        assert torch.equal(kept.weight(), merge(*given, dithered=True))
        assert not torch.equal(kept.weight(), before)
        assert kept.weight().data_ptr() == at
    layer.lora_B["default"].weight.data.zero_()  # which torch does not count
    assert not torch.equal(kept.weight(), layer.base_layer.weight)
    kept.forget()
    assert torch.equal(kept.weight(), layer.base_layer.weight)


@pytest.mark.parametrize("share", [0.03, 0.5, 0.9])
def test_rounding_goes_up_in_the_share_of_places_that_a_value_is_above_its_lower_neighbour(share: float) -> None:
    base = torch.randn(300, 257, generator=torch.Generator().manual_seed(4)).bfloat16()
    above = (base.view(torch.int16) + 1).view(torch.bfloat16)  # away from 0
    value = base.float() + share * (above.float() - base.float())
    made = torch.empty_like(base)
    assert dither_into(made, value.clone()) is made
    up = made == above
    assert bool((up | (made == base)).all())
    for places in (up, up[base > 0], up[base < 0], *up, *up.T):
        assert float(places.float().mean()) == pytest.approx(share, abs=0.04)
    assert torch.equal(dither_into(torch.empty_like(base), value.clone()), made)
    odd = torch.tensor([[0.0, -0.0, float("inf"), float("-inf"), 2.0**-130, 3.0, float("nan")]]).repeat(50, 1)
    same = dither_into(torch.empty(50, 7, dtype=torch.bfloat16), odd.clone())
    torch.testing.assert_close(same, odd.bfloat16(), atol=0, rtol=0, equal_nan=True)


def test_a_change_far_below_a_unit_of_the_weights_is_kept_on_average() -> None:
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(400, 500, generator=generator).bfloat16()
    down, up = torch.randn(2, 500, generator=generator) * 0.01, torch.randn(400, 2, generator=generator) * 0.02
    whole = [part.bfloat16() for part in (down, up)]
    x = torch.randn(64, 500, generator=generator)
    change = x @ (whole[1].float() @ whole[0].float()).T

    def kept(*, dithered: bool) -> float:
        made = merge("", base, *whole, 1.0, dithered=dithered).float() - base.float()
        return float(((x @ made.T) * change).sum() / change.square().sum())

    assert kept(dithered=True) == pytest.approx(1, abs=0.1)
    assert kept(dithered=False) < 0.5


def test_what_an_engine_without_adapters_is_sent_is_what_the_learner_computes_with() -> None:
    model = adapted(dtype=torch.bfloat16)
    sent = dict(merged(named_weights(model), dithered=True))
    exported = dict(merged_weights(model))
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            own: Any = layer.merged_weight
            for stream in (sent, exported):
                assert torch.equal(stream[clean_name(f"{name}.base_layer.weight")], own.weight())


def test_a_widened_model_has_the_numbers_that_it_had() -> None:
    model = adapted(dtype=torch.bfloat16)
    kept = [one.weight().clone() for one in merged_of(model)]
    model.float()
    for one, before in zip(merged_of(model), kept, strict=True):
        assert one.weight().dtype == torch.float32
        assert torch.equal(one.weight(), before.float())
    names = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    separate(model)
    assert not merged_of(model)
    assert names == {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def both(family: str, **given: Any) -> tuple[nn.Module, nn.Module]:
    """Two equal models, with merged weights and without."""
    one, other = (attach(plain(family), Lora(rank=4, merged=merged, **given), 0) for merged in (True, False))  # type: ignore[arg-type]
    for model in (one, other):
        jolt(model, 1)
    return one, other


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_as_with_separate_products(family: str) -> None:
    model, separate = both(family, targets="all-linear")
    assert len(merged_of(model)) == len(layers_of(separate)) > 0
    torch.testing.assert_close(logits_of(model, IDS), logits_of(separate, IDS), atol=1e-3, rtol=1e-3)


def test_adapters_on_experts_stay_apart() -> None:
    model, separate = both("qwen3-moe", expert_rank=2, targets="attention")
    assert len(merged_of(model)) == 8
    torch.testing.assert_close(logits_of(model, IDS), logits_of(separate, IDS), atol=1e-4, rtol=1e-4)
    assert any("expert" in name and "lora_A" in name for name, _ in model.named_parameters())


def test_the_reference_is_the_base() -> None:
    model = adapted(attention="sdpa")
    base = logits_of(llama(), IDS)
    merged = logits_of(model, IDS)
    with as_reference(model) as reference:
        torch.testing.assert_close(logits_of(reference, IDS), base)
    assert torch.equal(logits_of(model, IDS), merged)
    assert not torch.allclose(merged, base, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["paged", "native"])
def test_an_engine_samples_from_the_merged_weights(kind: str, dtype: torch.dtype) -> None:
    model, separate = adapted(dtype=dtype), adapted(merged=False, dtype=dtype, attention="sdpa")
    engine: Any = (
        paged_over(model) if kind == "paged" else NativeEngine(model, slots=4, stop_ids=frozenset(), decode=str)
    )
    if kind == "paged":
        fused = engine._fused.blocks[0]
        assert fused.qkv.adapter is None
        assert fused.mlp.room == 0
    for version in range(3):
        engine.load(iter(()), version)
        if kind == "paged" and version:  # as a worker does, before the driver has a request
            engine.refresh()
        engine.submit([Request("r", IDS[:9], "g", 7, Sampling(max_tokens=6), version)])
        (done,) = engine.completed()
        right = logprobs_of(separate, (*IDS[:9], *done.ids))[8:]
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        assert done.logprobs == pytest.approx(right, abs=tolerance)
        for layer in (
            *layers_of(model),
            *layers_of(separate),
        ):  # as an optimizer step whose writes torch does not count
            layer.lora_B["default"].weight.data.mul_(-3)
    assert len(merged_of(model)) == len(layers_of(model)) == 14


@pytest.mark.slow
def test_a_kernel_makes_all_layers_in_one_launch() -> None:
    pytest.importorskip("triton")
    interpreted(by_kernel)


def by_kernel() -> None:
    """Layers of several sizes and ranks, in memory of their own or in a wider matrix, get the bits of torch's operations."""
    from lockstep.models.low_rank_kernel import merge_by_kernel

    layers = []
    for outputs, inputs, rank in ((72, 136, 8), (24, 264, 16), (5, 7, 3), (64, 128, 8)):
        wide = (torch.randn(outputs, inputs + 8) * 0.02).bfloat16()
        a, b = torch.randn(rank, inputs) * 0.01, torch.randn(outputs, rank) * 0.01
        layers.append(Merge(wide[:, :inputs], a, b, torch.zeros(outputs, inputs, dtype=torch.bfloat16), 0.5 * rank))
    for chosen in (layers, layers[:2]):  # the second can be read several numbers at a time
        merge_by_kernel(chosen, STEPS, dithered=True)
        for one in chosen:
            torch.testing.assert_close(one.out_OX, merge("", *one[:3], one.scaling, dithered=True), atol=0, rtol=0)
            one.out_OX.zero_()
