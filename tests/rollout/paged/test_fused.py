"""Weights and adapters of a fused model lie in one tensor; whatever else touches them must not notice."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Lora, Recipe
from lockstep.errors import EngineError
from lockstep.learner.adapter_files import saved_tensors
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models.weights import named_weights
from lockstep.rollout.paged.joined import ALIGNED
from lockstep.sync.fingerprint import Fingerprinter, fingerprint
from lockstep.types import Batch, WeightStream
from tests.learner.batches import make_batch
from tests.learner.models import plain, tokens, twin
from tests.learner.test_numerics import with_adapter
from tests.rollout.paged.test_engine import TOLERANCE, paged_over

SCORED = [tokens(20, 1), tokens(7, 2)]


def adapted(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return with_adapter(twin(plain("qwen2")).to(dtype))


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in named_weights(model)}


def test_laying_them_out_changes_no_value_and_no_fingerprint():
    model = adapted()
    before = values(model)
    weighed = fingerprint(named_weights(model)).combined
    paged_over(model)
    after = values(model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert fingerprint(named_weights(model)).combined == weighed


def test_a_second_engine_reads_the_same_tensor():
    model = adapted()
    first, second = paged_over(model), paged_over(model)
    assert first._fused is not None
    assert second._fused is not None
    for one, other in zip(first._fused.blocks, second._fused.blocks, strict=True):
        for place in ("qkv", "out", "mlp.gate_up", "mlp.down"):
            mine, yours = attrgetter(place)(one).adapter, attrgetter(place)(other).adapter
            assert mine.wide_OY.data_ptr() == yours.wide_OY.data_ptr()
            assert mine.wide_OY.stride(0) % ALIGNED == 0
    for name, tensor in named_weights(model):
        assert first._fused.fused.get(name, tensor).data_ptr() == tensor.data_ptr()


def test_what_is_beside_an_up_matrix_is_zero_and_stays_so():
    model = adapted()
    engine = paged_over(model)
    train(model, 2)
    engine.score(SCORED)
    assert engine._fused is not None
    for block in engine._fused.blocks:
        adapter = block.qkv.adapter
        assert adapter is not None
        assert adapter.wide_OY is not None
        beside = adapter.wide_OY[:, -adapter.ranks :].clone()
        for outputs, ranks, up_OR in adapter.parts:
            assert torch.equal(beside[outputs, ranks], up_OR)
            beside[outputs, ranks] = 0
        assert not beside.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_training_goes_where_decoding_reads(states: str, dtype: torch.dtype):
    """The same updates on a model that was laid out and on one that was not: the same weights, and an engine that sees them."""
    laid_out, other = adapted(dtype), adapted(dtype)
    engine = paged_over(laid_out)
    before = engine.score(SCORED)
    train(laid_out, 3, states)
    train(other, 3, states)
    theirs = values(other)
    for name, tensor in values(laid_out).items():
        assert torch.equal(tensor, theirs[name])
    scored, wanted = engine.score(SCORED), TorchLearner(laid_out, recipe("fp32")).logprobs(SCORED)
    off, moved = (np.abs(np.concatenate(scored) - np.concatenate(x)).mean() for x in (wanted, before))
    assert off < (TOLERANCE if dtype == torch.float32 else 0.03)
    assert moved > 5 * off


def test_an_adapter_is_saved_as_if_nothing_had_happened(tmp_path: Path):
    model, other = adapted(), adapted()
    paged_over(model)
    ours, theirs = saved_tensors(model), saved_tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again: Any = twin(plain("qwen2"))
    again.load_adapter(str(tmp_path))
    merged, expected = (m.merge_and_unload() for m in (model, other))  # type: ignore[operator]
    for (name, tensor), (_, wanted) in zip(merged.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(tensor, wanted, msg=name)


def test_weights_that_are_their_own_masters_stay_dense():
    """torch's fused optimizers take a parameter's memory for one piece, and would train what lies between its rows."""
    model = adapted(torch.float32)
    paged_over(model)
    assert all(p.is_contiguous() for p in model.parameters())


def test_adapters_of_other_scalings_over_one_input_run_unfused():
    model = attach(twin(plain("llama")), Lora(rank=4), seed=0)
    layer: Any = next(m for n, m in model.named_modules() if n.endswith("q_proj"))
    layer.scaling["default"] *= 2
    assert paged_over(model)._fused is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [True, False])
def test_a_scaling_that_arrives_with_weights_is_decoded_with(dtype: torch.dtype, fused: bool):
    model = adapted(dtype)
    engine = paged_over(model, fused=fused)
    before = engine.score(SCORED)
    bound = engine._bound
    engine.load(scaled(model, 4.0), 1)
    after, expected = engine.score(SCORED), paged_over(model, fused=fused).score(SCORED)
    assert after == expected
    assert after != before
    assert engine._bound != bound  # captured steps hold it as a constant


def test_scalings_that_come_apart_are_refused():
    model = adapted()
    engine = paged_over(model)
    engine.load(scaled(model, 4.0, only="k_proj"), 1)
    with pytest.raises(EngineError, match="different scalings"):
        engine.score(SCORED)


def scaled(model: nn.Module, factor: float, only: str = "") -> WeightStream:
    for name, tensor in list(named_weights(model)):
        yield name, tensor * factor if name.endswith(".lora_scaling") and only in name else tensor.clone()


def test_a_frozen_tensor_that_is_loaded_is_read_again():
    """The engine's view of it has torch's count of the writes to it."""
    model = adapted()
    engine = paged_over(model)
    name = next(name for name, _ in named_weights(model) if name.endswith("q_proj.weight"))
    reader = Fingerprinter(frozenset({name}))
    reader.read(engine.weights())
    engine.load(iter([(n, t + 1 if n == name else t.clone()) for n, t in named_weights(model)]), 1)
    reader.read(engine.weights())
    assert reader.thawed == (name,)


def train(model: nn.Module, steps: int, states: str = "fp32") -> None:
    learner = TorchLearner(model, recipe(states))
    for _ in range(steps):
        learner.update(batch(), build_objective(recipe(states)).loss)


def batch() -> Batch:
    return make_batch(0.9)


def recipe(states: str) -> Recipe:
    return Recipe.model_validate(
        {"adapter": {"kind": "lora", "rank": 4}, "optimizer": {"kind": "adamw", "lr": 0.05, "states": states}}
    )
