"""Adapters merged into what is sent: by hand, against PEFT's own forward pass, and never accumulating."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.config.schema import Lora, Sync
from lockstep.errors import SyncError
from lockstep.learner.adapters import attach
from lockstep.models.attention import NAME
from lockstep.models.weights import frozen_names, named_weights
from lockstep.rollout.native import NativeEngine
from lockstep.sync.fingerprint import fingerprint
from lockstep.sync.merged import merge, merged, merged_names
from lockstep.sync.transports import CopySync, build_sync
from tests.learner.models import ByHand, logits_of, logprobs_of

VOCAB = 96
IDS = tuple(range(5, 25))


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16
    )
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype).eval()


def adapted(dtype: torch.dtype = torch.float32, rank: int = 4) -> nn.Module:
    """With adapters that do something: B is not zero."""
    model = attach(llama(dtype=dtype), Lora(rank=rank, alpha=3 * rank), 0)
    jolt(model, 1)
    return model


def jolt(model: nn.Module, seed: int) -> None:
    """Change every adapter, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))


def syncing(model: nn.Module) -> CopySync:
    names = frozenset(name for name, _ in named_weights(model))
    sync = build_sync(
        Sync(transport="copy"), vocab=VOCAB, numerics="fp32", frozen=frozen_names(model), transport="copy", merge=names
    )
    assert isinstance(sync, CopySync)
    return sync


# --- one matrix -----------------------------------------------------------------------------------------------------
def test_by_hand():
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    up, down = torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([[10.0, 20.0]])
    found = merge("w", base, down, up, 0.5)
    assert found.tolist() == [[6.0, 12.0], [3.0, 4.0], [0.0, -4.0]]
    assert base.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "the base stays clean"


def test_the_sum_is_made_in_fp32_and_rounded_once():
    torch.manual_seed(0)
    base, down, up = (
        torch.randn(64, 48).bfloat16(),
        torch.randn(8, 48).bfloat16(),
        (0.01 * torch.randn(64, 8)).bfloat16(),
    )
    found = merge("w", base, down, up, 1.5)
    exact = base.double() + 1.5 * up.double() @ down.double()
    nearest = exact.float().bfloat16()
    assert found.dtype == torch.bfloat16
    assert (found != nearest).float().mean() < 0.002, "fp32's own rounding may tip a tie"
    assert (found.double() - exact).abs().max() <= (nearest.double() - exact).abs().max() * 1.001


@pytest.mark.parametrize("shapes", [((3, 2), (1, 3), (3, 1)), ((3, 2), (1, 2), (2, 1))])
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...]):
    base, down, up = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(SyncError, match="adapter matrices of"):
        merge("w", base, down, up, 1.0)


# --- a model --------------------------------------------------------------------------------------------------------
def test_the_merged_model_is_the_adapted_one():
    model = adapted()
    plain = llama(seed=9)
    own = dict(plain.named_parameters())
    for name, tensor in merged(named_weights(model)):
        own[name].data.copy_(tensor)
    difference = (logits_of(plain, IDS) - logits_of(model, IDS)).abs().max()
    assert difference < 1e-4
    assert (logits_of(llama(), IDS) - logits_of(model, IDS)).abs().max() > 0.1, "the adapters matter"


def test_names_and_order_are_the_checkpoints():
    assert [name for name, _ in merged(named_weights(adapted()))] == [name for name, _ in llama().named_parameters()]


def test_without_adapters_nothing_changes():
    stream: list[tuple[str, Tensor]] = list(named_weights(llama()))
    found = list(merged(iter(stream)))
    assert [name for name, _ in found] == [name for name, _ in stream]
    assert all(a is b for (_, a), (_, b) in zip(found, stream, strict=True))


def test_which_tensors_stay_frozen():
    model = adapted()
    names = frozenset(name for name, _ in named_weights(model))
    frozen = merged_names(frozen_names(model), names)
    changed = {name for name, _ in llama().named_parameters()} - frozen
    assert all("_proj.weight" in name for name in changed)
    assert len(changed) == 2 * 7
    assert "model.embed_tokens.weight" in frozen


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "lora_scaling", "weight"])
def test_half_an_adapter_is_refused(part: str):
    layer = "model.layers.0.self_attn.q_proj"
    stream = ((name, tensor) for name, tensor in named_weights(adapted()) if name != f"{layer}.{part}")
    with pytest.raises(SyncError, match=rf"{layer}: the weights of the adapted layer lack \.{part}"):
        list(merged(stream))


# --- syncs ----------------------------------------------------------------------------------------------------------
def test_a_hundred_syncs_do_not_accumulate():
    """Training wanders off and comes back to where it was: so must the engine, bit by bit."""
    model = adapted()
    learner, sync = ByHand(model), syncing(model)
    engine = NativeEngine(llama(seed=5, attention=NAME), slots=2, stop_ids=frozenset(), decode=str)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    sync.push(learner, engine)
    first = fingerprint(engine.weights())
    for step in range(1, 100):
        jolt(model, step)
        learner.version = step
        assert sync.push(learner, engine).passed
    assert fingerprint(engine.weights()) != first
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in start:
                parameter.copy_(start[name])
    learner.version = 100
    proof = sync.push(learner, engine)
    assert fingerprint(engine.weights()) == first
    assert proof.passed


def test_the_push_sends_what_adapters_change_and_the_rest_once():
    model = adapted()
    learner, sync = ByHand(model), syncing(model)
    engine = NativeEngine(llama(seed=5, attention=NAME), slots=2, stop_ids=frozenset(), decode=str)
    first = sync.push(learner, engine)
    sent = sync.sent
    assert first.tensors == 2 * 9 + 3
    assert first.probe is not None
    assert first.probe.mean < 1e-5
    jolt(model, 3)
    learner.version = 1
    second = sync.push(learner, engine)
    assert second.changed == 14
    assert 0 < sync.sent < sent
    assert fingerprint(engine.weights()) == fingerprint(merged(learner.weights()))


def test_the_proofs_fingerprint_is_that_of_the_adapters_as_they_are_saved():
    """So that a checkpoint of this run is recognised by an engine that keeps adapters apart."""
    model = adapted()
    learner, sync = ByHand(model), syncing(model)
    engine = NativeEngine(llama(seed=5, attention=NAME), slots=2, stop_ids=frozenset(), decode=str)
    assert sync.push(learner, engine).fingerprint == fingerprint(named_weights(model)).combined


def test_the_control_falsifies_a_merged_tensor():
    model = adapted()
    learner, sync = ByHand(model), syncing(model)
    engine = NativeEngine(llama(seed=5, attention=NAME), slots=2, stop_ids=frozenset(), decode=str)
    sync.push(learner, engine)
    before = fingerprint(engine.weights())
    assert "_proj.weight" in sync.negative_control(learner, engine)
    assert fingerprint(engine.weights()) == before


# --- relatives of LoRA ------------------------------------------------------------------------------------------------
def test_a_row_gets_its_trained_length():
    """[3, 4] + 0.5 · 2 · [0, 0] is of length 5 and becomes one of length 10; [0, 2] becomes one of length 1."""
    base, up, down = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0, 1.0]])
    found = merge("w", base, down, up, 0.5, torch.tensor([10.0, 1.0]))
    assert found.tolist() == [[6.0, 8.0], [0.0, 1.0]]


@pytest.mark.parametrize("settings", [{"dora": True}, {"init": "pissa"}, {"init": "olora", "rslora": True}], ids=str)
def test_an_engine_without_adapters_gets_residual_and_adapter(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It held the original base. Were it left there and the adapter added, it would sample from another model."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    base = llama()
    model = attach(base, Lora.model_validate({"rank": 4} | settings), 0)  # type: ignore[arg-type]
    learner, sync = ByHand(model), syncing(model)
    engine = NativeEngine(llama(attention=NAME), slots=2, stop_ids=frozenset(), decode=str)
    proof = sync.push(learner, engine)
    assert proof.passed
    start = (torch.tensor(engine.score([IDS])[0]) - logprobs_of(llama(), IDS)).abs().max()
    assert start < 1e-4, "it begins as the base"
    jolt(model, 2)
    learner.version = 1
    second = sync.push(learner, engine)
    assert second.passed
    assert second.changed == 14
    found = torch.tensor(engine.score([IDS])[0])
    torch.testing.assert_close(found, logprobs_of(model, IDS), rtol=0, atol=1e-4)
    assert (found - logprobs_of(llama(), IDS)).abs().max() > 0.01
    if "init" in settings:  # the original base with this adapter on top: the proof must not take it
        weights = dict(llama().named_parameters())
        live = dict(named_weights(model))
        wrong = merged((name, weights.get(name, tensor)) for name, tensor in live.items())
        engine.load(((name, tensor.detach()) for name, tensor in wrong), 1)
        with pytest.raises(SyncError, match=r"weights are not the learner's"):
            sync.verify(learner, engine)
