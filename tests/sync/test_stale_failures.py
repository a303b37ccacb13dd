"""Ways in which engines came to sample with other weights than were trained, as people met them, planted and caught.

Each engine here is the native one, over a copy of the weights, with the fault of one report built into it. The thread is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.config.schema import Lora, NoAdapter, Sync
from lockstep.errors import SyncError
from lockstep.learner.adapters import attach
from lockstep.models.attention import NAME
from lockstep.models.weights import frozen_names, named_weights
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.vllm.layout import checkpoint_views, share
from lockstep.sync.transports import CopySync, build_sync
from lockstep.types import Request, Sampling, TokenIds, WeightStream
from tests.learner.models import ByHand, logprobs_of
from tests.rollout.vllm.fused import FusedLlama

VOCAB = 96
LAYER = "model.layers.1.self_attn"


def llama(seed: int = 0, attention: str = "sdpa") -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


class Trained(ByHand):
    """A learner that is changed by hand."""

    def train(self) -> None:
        """Every trained tensor moves."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


class Engine(NativeEngine):
    """The native engine over a model of its own. Sound: the faults are in what is derived from it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model or llama(seed=9, attention=NAME), slots=2, stop_ids=frozenset(), decode=str)


def copying(model: nn.Module, *, merge: bool = False, probes: bool = False) -> CopySync:
    """Without probes unless asked: fingerprints alone must do."""
    names = frozenset(name for name, _ in named_weights(model)) if merge else None
    settings = Sync(transport="copy", probe_first=100 if probes else 0, probe_every=1000)
    frozen = frozen_names(model)
    sync = build_sync(settings, vocab=VOCAB, numerics="fp32", frozen=frozen, transport="copy", merge=names)
    assert isinstance(sync, CopySync)
    sync._prover.next_push()  # the very first push is probed whatever the schedule says
    return sync


def with_adapters() -> nn.Module:
    model = attach(llama(), Lora(rank=4), 0)
    Trained(model).train()
    return model


def test_without_a_fault_all_of_this_passes():
    for merge in (False, True):
        learner = Trained(with_adapters() if merge else llama())
        engine, sync = Engine(), copying(learner.model, merge=merge)
        for _ in range(4):
            assert sync.push(learner, engine).passed
            learner.train()


# --- 1 --------------------------------------------------------------------------------------------------------------
def test_a_reload_that_returns_and_did_nothing():
    """vllm#32718, vllm#29341: `reload_weights` returns with stale weights."""

    class Polite(Engine):
        deaf = False

        def load(self, weights: WeightStream, version: int) -> None:
            super().load(iter(()) if self.deaf else weights, version)
            for _ in weights:
                pass

    learner = Trained(llama())
    engine, sync = Polite(), copying(learner.model)
    assert sync.push(learner, engine).passed
    learner.train()
    engine.deaf = True
    with pytest.raises(SyncError, match="stale, still the tensor of the last proof"):
        sync.push(learner, engine)


# --- 2 --------------------------------------------------------------------------------------------------------------
def test_a_base_that_sleep_discarded_and_nobody_sent_again():
    """verl#3159, verl#3437: LoRA with sleep level 2. What no adapter changes is sent once, and then it is gone."""

    class Forgetful(Engine):
        def sleep(self) -> None:
            self.lost = True

        lost = False

        def wake(self) -> None:
            if self.lost:
                self.lost = False
                for name, tensor in self.weights():
                    if "embed" in name or "norm" in name:
                        tensor.data.zero_()  # behind torch's counters of changes, as an unmapped page is

    learner = Trained(with_adapters())
    engine, sync = Forgetful(), copying(learner.model, merge=True)
    assert sync.push(learner, engine).passed
    engine.sleep()
    learner.train()
    seen: list[str] = []
    engine.load = noting(engine.load, seen)  # type: ignore[method-assign]
    proof = sync.push(learner, engine)
    assert seen == ["part", "all"], "the first proof failed, and then everything was sent"
    assert proof.passed


def noting(load: Callable[[WeightStream, int], None], seen: list[str]) -> Callable[[WeightStream, int], None]:
    """Note whether a load had all tensors."""

    def noted(weights: WeightStream, version: int) -> None:
        tensors = list(weights)
        seen.append("all" if any("embed" in name for name, _ in tensors) else "part")
        load(iter(tensors), version)

    return noted


# --- 3 --------------------------------------------------------------------------------------------------------------
def test_waking_that_brings_the_old_weights_back(caplog: pytest.LogCaptureFixture):
    """trl#5312: weights sent to a sleeping engine are overwritten by its backup when it wakes; gap of log-probs 0.01 → 0.2."""

    class Restoring(Engine):
        backup: dict[str, Tensor] | None = None

        def sleep(self) -> None:
            self.backup = {name: tensor.clone() for name, tensor in self.weights()}

        def wake(self) -> None:
            if self.backup is not None:
                for name, tensor in self.weights():
                    tensor.copy_(self.backup[name])
                self.backup = None

    learner = Trained(llama())
    engine, sync = Restoring(), copying(learner.model)
    assert sync.push(learner, engine).passed
    engine.sleep()
    learner.train()
    proof = sync.push(learner, engine)
    assert "sync v1 FAILED" in caplog.text
    assert "stale" in caplog.text
    assert proof.passed, "sent again to the engine that is awake now"
    engine.wake()
    assert sync.verify(learner, engine).fingerprint == proof.fingerprint


# --- 4 --------------------------------------------------------------------------------------------------------------
class LaidOut(Engine):
    """Computes with fused and padded tensors, as vLLM does: the model's parameters are views of them."""

    def __init__(self) -> None:
        model = llama(seed=9, attention=NAME)
        self.fused = FusedLlama(model.config)
        self.fused.load_weights(named_weights(model))
        share(model, checkpoint_views(self.fused))
        super().__init__(model)

    def load(self, weights: WeightStream, version: int) -> None:
        super().load(iter(()), version)
        self.fused.load_weights(weights)

    def weights(self) -> WeightStream:
        return checkpoint_views(self.fused)


def test_a_fused_layout_without_a_fault_passes():
    learner = Trained(llama())
    engine, sync = LaidOut(), copying(learner.model, probes=True)
    for _ in range(3):
        proof = sync.push(learner, engine)
        assert proof.probe is not None
        assert proof.probe.mean < 1e-4
        learner.train()
    sync.push(learner, engine)
    sync.negative_control(learner, engine)


def test_a_reload_that_puts_fused_parts_in_each_others_place():
    """verl#7978: weights wrong after a layer-wise reload. Here keys and values of one layer are exchanged."""

    class Confused(LaidOut):
        confused = False

        def load(self, weights: WeightStream, version: int) -> None:
            def exchanged() -> WeightStream:
                other = {"k_proj": "v_proj", "v_proj": "k_proj"}
                for name, tensor in weights:
                    part = name.split(".")[-2] if self.confused and LAYER in name else ""
                    yield name.replace(part, other[part]) if part in other else name, tensor

            super().load(exchanged(), version)

    learner = Trained(llama())
    engine, sync = Confused(), copying(learner.model)
    assert sync.push(learner, engine).passed
    learner.train()
    engine.confused = True
    with pytest.raises(SyncError) as caught:
        sync.push(learner, engine)
    assert f"{LAYER}.k_proj.weight: differs" in caught.value.what
    assert f"{LAYER}.v_proj.weight: differs" in caught.value.what
    assert caught.value.what.count("differs") == 2


# --- 5 --------------------------------------------------------------------------------------------------------------
def test_adapters_that_sleep_corrupts():
    """vllm#53888: sleep level 1 silently corrupts LoRA."""

    class Corrupting(Engine):
        asleep = False

        def sleep(self) -> None:
            self.asleep = True

        def wake(self) -> None:
            if self.asleep:
                for name, tensor in self.weights():
                    if name == f"{LAYER}.q_proj.lora_B":
                        tensor.copy_(tensor.roll(1, 0))
            self.asleep = False

    learner = Trained(with_adapters())
    engine = Corrupting(attach(llama(attention=NAME), Lora(rank=4), 3))
    sync = copying(learner.model)
    assert sync.push(learner, engine).passed
    engine.sleep()
    with pytest.raises(SyncError, match=rf"{LAYER}\.q_proj\.lora_B: differs"):
        sync.verify(learner, engine)


# --- 6 --------------------------------------------------------------------------------------------------------------
def test_an_engine_that_computes_with_a_copy_it_made_before():
    """NeMo-RL PR#2895: CUDA graphs read repacked weights that a refit did not reach. No fingerprint shows it; the probe does."""

    class Repacked(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.packed: Engine | None = None

        def load(self, weights: WeightStream, version: int) -> None:
            super().load(weights, version)
            if self.packed is None:
                self.packed = Engine(copy.deepcopy(self._model))

        def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
            assert self.packed is not None
            return self.packed.score(sequences)

    learner = Trained(llama())
    engine, sync = Repacked(), copying(learner.model, probes=True)
    assert sync.push(learner, engine).passed
    learner.train()
    with pytest.raises(SyncError, match=r"probe: mean .* above 0\.0001") as caught:
        sync.push(learner, engine)
    assert "differs" not in caught.value.what


# --- 7 --------------------------------------------------------------------------------------------------------------
def test_a_resume_that_samples_with_the_initial_weights():
    """open-instruct PR#1627, slime#1695: the trainer resumes at step 20, the engine starts with what it was started with."""

    class Confident(Engine):
        def load(self, weights: WeightStream, version: int) -> None:
            if version != self.version:  # "these weights are here already"
                super().load(weights, version)

    base = llama()
    learner = Trained(copy.deepcopy(base))
    for _ in range(20):
        learner.train()
    engine = Confident(twin_of(base))
    engine.version = learner.version
    sync = copying(learner.model)
    with pytest.raises(SyncError, match=r"differs, .* elements"):
        sync.push(learner, engine)


def twin_of(model: LlamaForCausalLM) -> nn.Module:
    other = copy.deepcopy(model)
    other.config._attn_implementation = NAME
    return other


# --- 8 --------------------------------------------------------------------------------------------------------------
def test_deltas_that_are_added_again_and_again():
    """fruitfoxlu/rft §11.19: each sync adds the whole delta to what the last one left (67.1 % in training, 60.4 % afterwards)."""

    class Adding(Engine):
        """Is right the first time: base + delta."""

        def __init__(self, base: nn.Module) -> None:
            super().__init__(twin_of(base))  # type: ignore[arg-type]
            self.base = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}

        def load(self, weights: WeightStream, version: int) -> None:
            own = dict(self.weights())
            super().load(((name, own[name] + (tensor - self.base[name])) for name, tensor in weights), version)

    base = llama()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_((parameter * 64).round() / 64 + 0.0)  # sums of such numbers are exact; no -0
    model = attach(copy.deepcopy(base), Lora(rank=4, alpha=4), 0)
    learner = Trained(model)
    engine, sync = Adding(base), copying(model, merge=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_((parameter * 8).round() / 8)
    assert sync.push(learner, engine).passed
    for round_ in (1, 2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.125)
        learner.version = round_
        if round_ == 1:
            assert sync.push(learner, engine).passed, "the delta was zero before: nothing is added twice yet"
        else:
            with pytest.raises(SyncError, match=r"_proj\.weight: differs"):
                sync.push(learner, engine)


# --- 9 --------------------------------------------------------------------------------------------------------------
def test_a_receiver_that_reads_after_the_sender_has_moved_on():
    """prime-rl PR#1857: a broadcast is deleted, or filled anew, while it is still being read."""

    class Late(Engine):
        late = False

        def load(self, weights: WeightStream, version: int) -> None:
            super().load(iter(list(weights)) if self.late else weights, version)

    class Buffered(Trained):
        """Its weights pass through one buffer: each is valid until the next is asked for."""

        def weights(self) -> WeightStream:
            buffer = torch.zeros(VOCAB * 48)
            for name, tensor in super().weights():
                view = buffer[: tensor.numel()].view(tensor.shape)
                yield name, view.copy_(tensor)

    learner = Buffered(llama())
    engine, sync = Late(), copying(learner.model)
    assert sync.push(learner, engine).passed
    learner.train()
    engine.late = True
    with pytest.raises(SyncError, match="differs"):
        sync.push(learner, engine)


# --- 10 -------------------------------------------------------------------------------------------------------------
def test_a_cache_of_prefixes_that_outlives_its_weights_shows_in_what_is_sampled():
    """vllm#48312: a right tensor is not a right answer. The engine forgets processed prompts at every version."""
    learner = Trained(llama())
    engine, sync = Engine(), copying(learner.model)
    sync.push(learner, engine)
    prompt = tuple(range(5, 40))

    def greedy(version: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        engine.submit([Request("a", prompt, "g", 0, Sampling(6, temperature=0.0), version, prefix=20)])
        (done,) = engine.completed()
        return done.ids, done.logprobs

    before = greedy(0)
    learner.train()
    sync.push(learner, engine)
    ids, logprobs = greedy(1)
    wanted = learner.logprobs([prompt + ids])[0][len(prompt) - 1 :]
    assert logprobs == pytest.approx(wanted, abs=1e-4)
    assert (ids, logprobs) != before


def test_the_adapters_of_these_tests_do_something():
    model, base = with_adapters(), attach(llama(), NoAdapter(), 0)
    ids = tuple(range(5, 30))
    assert (logprobs_of(model, ids) - logprobs_of(base, ids)).abs().max() > 0.05
