"""Layers that read one input, in one product: against the same layers one by one, in double precision."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.models.one_input import ATTENTION, AttentionInputs, OneInput, adjacent, side_by_side
from lockstep.rollout.paged.joined import joined
from tests.learner.models import plain, twin

NAMES, SIZES, INPUTS = ("q_proj", "k_proj", "v_proj"), (8, 4, 4), 6


class Layers(nn.Module):
    """Three layers, whose weights are adjacent in memory or not."""

    def __init__(self, *, biased: bool, lay: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, size in zip(NAMES, SIZES, strict=True):
            self.add_module(name, nn.Linear(INPUTS, size, bias=biased, dtype=torch.float64))
        names = {id(p): n for n, p in self.named_parameters()}
        for kind in ("weight", "bias") if biased else ("weight",):
            if lay:
                joined([getattr(self.get_submodule(name), kind) for name in NAMES], names, {})


def outputs_and_gradients(model: Layers, x: Tensor, outputs: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    mixes = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [x, *model.parameters()], mixes)]


def given() -> Tensor:
    return torch.randn(1, 5, INPUTS, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("biased", [True, False])
def test_one_product_equals_the_layers(biased: bool):
    model, x = Layers(biased=biased), given()
    found = OneInput(model, NAMES)(x)
    assert all(type(one.grad_fn).__name__ != "AddmmBackward0" for one in found)
    assert found[0].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()  # one product made all
    alone = [model.get_submodule(name)(x) for name in NAMES]
    expected = outputs_and_gradients(model, x, alone)
    torch.testing.assert_close(outputs_and_gradients(model, x, found), expected)


def test_an_output_that_is_not_used_gives_no_gradient():
    model, x = Layers(biased=True), given()
    _, key, _ = OneInput(model, NAMES)(x)
    key.sum().backward()
    q, k, v = (model.get_submodule(name).weight.grad for name in NAMES)
    assert q is not None and k is not None and v is not None  # noqa: PT018
    assert not q.any() and not v.any() and bool(k.any())  # noqa: PT018


def test_frozen_layers_get_no_gradient():
    model, x = Layers(biased=True).requires_grad_(False), given()
    model.get_submodule("k_proj").requires_grad_(True)
    sum(one.sum() for one in OneInput(model, NAMES)(x)).backward()  # type: ignore[union-attr]
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {"k_proj.weight", "k_proj.bias"}
    assert x.grad is not None


@pytest.mark.parametrize("reason", ["apart", "hook", "another kind", "a bias too few"])
def test_layers_that_cannot_be_joined_are_called_one_by_one(reason: str):
    model, x, seen = Layers(biased=True, lay=reason != "apart"), given(), []
    match reason:
        case "hook":
            model.get_submodule("k_proj").register_forward_hook(lambda *_: seen.append("k_proj"))
        case "another kind":
            model.k_proj = nn.Sequential(model.get_submodule("k_proj"))
        case "a bias too few":
            model.get_submodule("v_proj").bias = None
    found = OneInput(model, NAMES)(x)
    assert [one.shape[-1] for one in found] == list(SIZES)
    assert found[0].untyped_storage().data_ptr() != found[2].untyped_storage().data_ptr()
    assert seen == (["k_proj"] if reason == "hook" else [])


def test_an_attention_module_computes_the_same():
    model: Any = twin(plain("qwen2")).double()
    attention = model.model.layers[0].self_attn
    own, names = type(attention).forward, {id(p): n for n, p in model.named_parameters()}
    for kind in ("weight", "bias"):
        joined([getattr(attention.get_submodule(name), kind) for name in ATTENTION], names, {})
    x = torch.randn(1, 7, model.config.hidden_size, dtype=torch.float64)
    cos, sin = model.model.rotary_emb(x, torch.arange(7)[None])

    def computed(module: Any) -> Tensor:
        found: Tensor = module.forward(x, (cos, sin), None, layout=Causal())[0]
        return found

    expected = computed(attention)
    attention.forward = MethodType(own, AttentionInputs(attention))
    calls: list[str] = []
    attention.k_proj.forward = lambda x: calls.append("k") or torch.zeros(())
    with pytest.raises(RuntimeError):
        computed(attention)  # a replaced forward pass is not skipped
    del attention.k_proj.forward
    torch.testing.assert_close(computed(attention), expected)
    other = copy.deepcopy(attention)
    with torch.no_grad():
        other.q_proj.weight.mul_(2)
    torch.testing.assert_close(computed(attention), expected)
    assert not torch.allclose(computed(other), expected)


class Causal:
    """A layout of one sequence."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: Any) -> Tensor:
        from lockstep.models.attention import causal_attention

        return causal_attention(query[None], key[None], value[None], kind)[0].transpose(0, 1)


def test_calls_with_another_input_are_served_alone():
    model, x = Layers(biased=True), given()
    inputs = AttentionInputs(model)
    other = x.detach() * 2
    query, key, value = inputs.q_proj(x), inputs.k_proj(other), inputs.v_proj(x)
    alone = [model.get_submodule(name)(one) for name, one in zip(NAMES, (x, other, x), strict=True)]
    torch.testing.assert_close([query, key, value], alone)
    torch.testing.assert_close(inputs.k_proj(x), model.get_submodule("k_proj")(x))  # nothing is kept any more
    assert inputs._kept.input is None


def test_columns_of_one_tensor_are_joined_without_a_copy():
    whole = torch.arange(24.0).view(3, 8)
    parts = whole[:, 1:3], whole[:, 3:4], whole[:, 4:8]
    found = side_by_side(parts)
    assert torch.equal(found, whole[:, 1:])
    assert found.data_ptr() == parts[0].data_ptr()
    for apart in ((parts[0], parts[2]), (parts[1], parts[0]), (parts[0], parts[1].clone())):
        assert torch.equal(side_by_side(apart), torch.cat(apart, 1))


def test_rows_of_one_tensor_are_joined_without_a_copy():
    whole = torch.arange(24.0).view(8, 3)
    found = adjacent((whole[1:3], whole[3:4], whole[4:8]))
    assert found is not None
    assert torch.equal(found, whole[1:])
    assert adjacent((whole[1:3], whole[4:8])) is None
    assert adjacent((whole[:2, :2], whole[2:, :2])) is None
