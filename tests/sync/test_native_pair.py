"""The proof between the real learner and the native engine, over a random model of two layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.config.schema import Adapter, Lora, NoAdapter, Recipe, Sync
from lockstep.errors import SyncError
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models.attention import NAME
from lockstep.models.weights import frozen_names
from lockstep.rollout.native import NativeEngine
from lockstep.sync.proof import Numerics
from lockstep.sync.transports import CopySync, SharedSync, build_sync
from lockstep.types import Batch, LossInput, LossOutput, TrainSequence

VOCAB = 128
DTYPES: dict[Numerics, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tiny_model(adapter: Adapter, numerics: Numerics, seed: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    config._attn_implementation = NAME
    torch.manual_seed(seed)
    return attach(LlamaForCausalLM(config).to(DTYPES[numerics]).eval(), adapter, seed)


def parts(
    transport: str, adapter: Adapter, numerics: Numerics = "fp32"
) -> tuple[TorchLearner, NativeEngine, SharedSync | CopySync]:
    model = tiny_model(adapter, numerics, 0)
    own = model if transport == "shared" else tiny_model(adapter, numerics, 1)
    engine = NativeEngine(own, slots=4, stop_ids=frozenset(), decode=str)
    settings = Sync.model_validate({"transport": transport})
    sync = build_sync(settings, vocab=VOCAB, numerics=numerics, special=(0, 1), frozen=frozen_names(model))
    return TorchLearner(model, Recipe(adapter=adapter)), engine, sync


def train(learner: TorchLearner) -> None:
    def loss(given: LossInput) -> LossOutput:
        return LossOutput(-given.logprobs_T * given.advantages_T)

    sequence = TrainSequence((3, 4, 5), (6, 7, 8), (True,) * 3, (-4.0,) * 3, (1.0, -1.0, 0.5), 1.0, 0)
    learner.update(Batch((sequence,)), loss)


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [NoAdapter(), Lora(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("transport", ["shared", "copy"])
def test_the_engine_follows_the_learner(transport: str, adapter: Adapter, numerics: Numerics):
    learner, engine, sync = parts(transport, adapter, numerics)
    first = sync.push(learner, engine)
    sync.negative_control(learner, engine)
    everything = sum(tensor.nbytes for _, tensor in learner.weights())
    assert sync.sent == (0 if transport == "shared" else everything)
    train(learner)
    proof = sync.push(learner, engine)
    assert proof.passed
    assert proof.version == engine.version == learner.version == 1
    assert proof.changed > 0
    assert proof.fingerprint != first.fingerprint
    assert proof.probe is not None
    if transport == "copy":
        assert sync.sent == (everything if adapter.kind == "none" else trained_bytes(learner))
    assert sync.verify(learner, engine).fingerprint == proof.fingerprint


def trained_bytes(learner: TorchLearner) -> int:
    frozen = frozen_names(learner.model)
    return sum(tensor.nbytes for name, tensor in learner.weights() if name not in frozen)


def test_a_scaling_that_did_not_arrive_is_named():
    learner, engine, sync = parts("copy", Lora(rank=4, alpha=8))
    sync.push(learner, engine)
    layer = next(module for module in engine._model.modules() if hasattr(module, "lora_A"))
    layer.scaling["default"] = 1.0  # type: ignore[operator, index]
    with pytest.raises(SyncError, match=r"q_proj\.lora_scaling: differs, 1 of 1 elements"):
        sync.verify(learner, engine)
    assert sync.push(learner, engine).passed


def test_a_weight_of_the_engine_that_drifts_is_named():
    learner, engine, sync = parts("copy", NoAdapter())
    sync.push(learner, engine)
    name, tensor = next((n, t) for n, t in engine.weights() if "down_proj" in n)
    tensor[[1, 2]] = tensor[[2, 1]]
    with pytest.raises(SyncError, match=rf"{name}: differs, rows 1 and 2 are swapped"):
        sync.verify(learner, engine)
