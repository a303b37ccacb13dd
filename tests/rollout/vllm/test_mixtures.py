"""Experts in vLLM's layout: views under the checkpoint's names, loading, and one set of weights with the learner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import EngineError
from lockstep.models.weights import named_weights
from lockstep.rollout.vllm.layout import MIXTURES, checkpoint_views, of_experts, share
from lockstep.rollout.vllm.worker import WorkerCalls
from lockstep.sync.fingerprint import fingerprint
from tests.rollout.vllm.mixtures import LaidOut, mixture


class Worker(WorkerCalls):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def get_model(self) -> nn.Module:
        return self._model


def served(model: Any) -> LaidOut:
    engine = LaidOut(model)
    worker: Any = Worker(engine)
    worker.lockstep_load(named_weights(model), "/m")
    return engine


@pytest.mark.parametrize("family", MIXTURES)
def test_all_is_loaded_and_the_views_are_the_checkpoint(family: str):
    model = mixture(family)
    engine = served(model)
    assert not any(parameter.isnan().any() for parameter in engine.parameters()), "all of it was loaded"
    found, wanted = dict(checkpoint_views(engine)), dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(found[name], parameter), name
    assert fingerprint(checkpoint_views(engine)) == fingerprint(named_weights(model))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_single_number_of_an_expert_is_seen(family: str):
    model = mixture(family)
    engine = served(model)
    wanted = fingerprint(named_weights(model))
    for name, parameter in engine.named_parameters():
        if ".routed_experts." in name:
            kept = parameter.data.clone()
            parameter.data[3].view(-1)[-1] += 1
            found = fingerprint(checkpoint_views(engine))
            (differs,) = [n for n in wanted.tensors if found.tensors[n] != wanted.tensors[n]]
            assert of_experts(differs)
            parameter.data.copy_(kept)


def test_gpt_oss_by_hand():
    """Gate and up alternate in both; vLLM has outputs before inputs."""
    engine = served(mixture("gpt_oss"))
    experts = engine.get_submodule("model.layers.1.mlp.experts.routed_experts")
    views = dict(checkpoint_views(engine))
    assert experts.w13_weight.shape == (4, 48, 48)
    assert torch.equal(views["model.layers.1.mlp.experts.down_proj"][2], experts.w2_weight[2].T)  # type: ignore[index, union-attr]
    assert views["model.layers.1.mlp.experts.down_proj"].shape == (4, 24, 48)
    assert "model.layers.0.self_attn.sinks" in views
    assert "model.embed_tokens.weight" in views


@pytest.mark.parametrize("family", MIXTURES)
def test_the_learner_trains_the_engines_experts(family: str):
    model = mixture(family)
    engine = served(model)
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    share(model, checkpoint_views(engine))
    assert torch.equal(model(input_ids=ids).logits, before)
    start = fingerprint(checkpoint_views(engine))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = fingerprint(checkpoint_views(engine))
    assert after == fingerprint(named_weights(model))
    assert all(after.tensors[name] != start.tensors[name] for name in after.tensors if of_experts(name))


def test_experts_of_another_shape_are_refused_by_name():
    model = mixture("qwen3_moe")
    worker: Any = Worker(LaidOut(model))
    name = "model.layers.1.mlp.experts.down_proj"
    stream = ((n, t[:, :1] if n == name else t) for n, t in named_weights(model))
    with pytest.raises(
        EngineError,
        match=r"cannot load model\.layers\.1\.mlp\.experts\.down_proj: ValueError: its shape is \[4, 1, 24\]",
    ):
        worker.lockstep_load(stream, "/m")
