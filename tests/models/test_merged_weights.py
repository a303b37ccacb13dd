"""Layers that compute with their adapter merged in: outputs and gradients, when the weight is made again, and engines over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.adapter import Lora
from lockstep.learner.adapters import as_reference, attach
from lockstep.learner.lora_linear import LoraLinear
from lockstep.models.low_rank import merge
from lockstep.models.merged_weights import merged_of
from lockstep.rollout.native import NativeEngine
from lockstep.types import Request, Sampling
from tests.learner.models import logits_of, logprobs_of
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


def test_the_weight_is_the_rounded_sum_and_follows_the_adapter_in_its_place() -> None:
    model = adapted(dtype=torch.bfloat16)
    layer = layers_of(model)[0]
    kept, at = layer.merged_weight, layer.merged_weight.tensor.data_ptr()
    for write in (lambda: jolt(model, 3), lambda: layer.scaling.update(default=0.25)):
        before = kept.weight().clone()
        write()
        a, b = (getattr(layer, kind)["default"].weight.detach() for kind in ("lora_A", "lora_B"))
        wide = layer.base_layer.weight.double() + layer.scaling["default"] * b.double() @ a.double()
        torch.testing.assert_close(kept.weight(), wide.bfloat16(), atol=0, rtol=2**-7)
        assert torch.equal(kept.weight(), merge("", layer.base_layer.weight, a, b, layer.scaling["default"]))
        assert not torch.equal(kept.weight(), before)
        assert kept.weight().data_ptr() == at
    layer.lora_B["default"].weight.data.zero_()  # which torch does not count
    assert not torch.equal(kept.weight(), layer.base_layer.weight)
    kept.forget()
    assert torch.equal(kept.weight(), layer.base_layer.weight)


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
    for version in range(2):
        engine.load(iter(()), version)
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
