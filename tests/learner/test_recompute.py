"""Recomputed activations: the same gradients to the bit, and what is kept for them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Lora, Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.types import LossInput, LossOutput
from tests.interpreter import interpreted
from tests.learner.batches import learner_gradients, make_batch
from tests.learner.models import VOCAB, logits_of, plain, tokens, twin

MODES = ("none", "selective", "full")


def recipe(mode: str) -> Recipe:
    return Recipe.model_validate({"update": {"recompute": mode}, "optimizer": {"kind": "adamw", "lr": 0.0}})


def build(family: str, *, lora: bool = False) -> nn.Module:
    model = twin(plain(family))
    return attach(model, Lora(rank=4), seed=0) if lora else model  # type: ignore[arg-type]


def inputs_of_products(model: nn.Module, names: tuple[str, ...]) -> list[tuple[str, StorageWeakRef]]:
    """Filled by each forward pass: the memory of what goes into the named layers."""
    seen: list[tuple[str, StorageWeakRef]] = []
    for name, module in model.named_modules():
        if (stem := name.rpartition(".")[2]) in names:

            def note(_: Any, given: tuple[Tensor, ...], stem: str = stem) -> None:
                if given[0].requires_grad:
                    seen.append((stem, StorageWeakRef(given[0].untyped_storage())))

            module.register_forward_pre_hook(note)
    return seen


@pytest.mark.parametrize("lora", [False, True], ids=["full training", "adapters"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "starcoder2"])
def test_every_gradient_is_the_same_to_the_bit(family: str, lora: bool):
    loss = build_objective(recipe("none")).loss
    results = {mode: learner_gradients(build(family, lora=lora), make_batch(0.7), loss, recipe(mode)) for mode in MODES}
    metrics, gradients = results["none"]
    for mode in MODES:
        assert results[mode][0] == metrics
        assert all(torch.equal(results[mode][1][name], grad) for name, grad in gradients.items())


@pytest.mark.parametrize("lora", [False, True], ids=["full training", "adapters"])
@pytest.mark.parametrize("mode", MODES)
def test_selective_keeps_no_input_of_a_product_that_is_cheap_to_make_again(mode: str, lora: bool):
    model = build("qwen3", lora=lora)
    seen = inputs_of_products(model, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    alive: dict[str, int] = {}

    def loss(inputs: LossInput) -> LossOutput:
        """Called between forward and backward pass."""
        for stem, memory in seen:
            alive[stem] = alive.get(stem, 0) + (not memory.expired())
        return LossOutput(-inputs.logprobs_T)

    TorchLearner(model, recipe(mode)).update(make_batch(), loss)
    per_layer = {
        "none": dict.fromkeys(alive, 2),
        "selective": dict.fromkeys(alive, 0) | {"o_proj": 2},
        "full": dict.fromkeys(alive, 0),
    }[mode]
    if lora:  # what is above the first adapter alone has a gradient
        first = {name: per_layer[name] // 2 for name in ("q_proj", "k_proj", "v_proj")}
        per_layer = per_layer | (first if mode == "none" else {})
    assert len(alive) == 7
    assert alive == per_layer


def test_without_gradient_nothing_is_remembered_and_nothing_changes():
    model, reference = build("llama"), plain("llama")
    learner = TorchLearner(model, recipe("selective"))
    ids = tokens(12, 1)
    found = learner.logprobs([ids])
    assert found == TorchLearner(build("llama"), recipe("none")).logprobs([ids])
    learner.update(make_batch(old=False, ref=False), build_objective(recipe("none")).loss)
    selective: Any = model.get_decoder().lockstep_selective  # type: ignore[operator]
    assert selective._latest is None
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    assert torch.equal(logits_of(model, ids), logits_of(reference, ids))


def test_a_copy_of_the_model_is_another_model():
    model = build("llama")
    learner = TorchLearner(model, recipe("selective"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    ids = tokens(12, 1)
    assert learner.logprobs([ids]) == TorchLearner(build("llama"), recipe("none")).logprobs([ids])
    assert TorchLearner(other, recipe("none")).logprobs([ids])[0] == (pytest.approx(-math.log(VOCAB)),) * 11


def with_fused_layers() -> None:
    """Fused kernels keep their inputs alone; what selective drops is made again by the same kernel."""
    from lockstep.models.fused_layers import fuse_layers

    loss = build_objective(recipe("none")).loss
    results = {}
    for mode in MODES:
        model = build("qwen3")
        assert fuse_layers(model).norms == 9
        seen = inputs_of_products(model, ("q_proj", "down_proj"))
        metrics, gradients = learner_gradients(model, make_batch(0.7), loss, recipe(mode))
        results[mode] = gradients
        assert len(seen) == (8 if mode == "full" else 4)
        assert metrics["grad/skipped"] == 0
    for mode in MODES:
        assert all(torch.equal(results[mode][name], grad) for name, grad in results["none"].items()), mode
    _, plainly = learner_gradients(build("qwen3"), make_batch(0.7), loss, recipe("none"))
    for name, grad in plainly.items():
        assert (results["none"][name] - grad).abs().max() < 1e-5 * grad.abs().max(), name


@pytest.mark.slow
def test_fused_layers_are_recomputed_by_their_kernels():
    interpreted(with_fused_layers)
