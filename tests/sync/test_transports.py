from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.config.schema import Sync
from lockstep.errors import StaleWeightsError, SyncError
from lockstep.sync.fingerprint import fingerprint
from lockstep.sync.proof import _same_storage, proof_settings
from lockstep.sync.transports import CopySync, SharedSync, build_sync
from lockstep.types import Batch, LossInput, LossOutput, Request, Sampling, TokenIds, TrainSequence, WeightStream
from tests.sync.tiny import (
    BASE,
    VOCAB,
    FaultyEngine,
    MisreportingEngine,
    TinyEngine,
    TinyLearner,
    TinyModel,
    flip_bit,
    on,
    pair,
    swap_rows,
)


def shared(frozen: frozenset[str] = frozenset(), **settings: int) -> SharedSync:
    sync = build_sync(Sync(transport="shared", **settings), vocab=VOCAB, numerics="fp32", frozen=frozen)
    assert isinstance(sync, SharedSync)
    return sync


def copying(frozen: frozenset[str] = frozenset(), **settings: int) -> CopySync:
    sync = build_sync(Sync(transport="copy", **settings), vocab=VOCAB, numerics="fp32", frozen=frozen)
    assert isinstance(sync, CopySync)
    return sync


def train(learner: TinyLearner) -> None:
    sequence = TrainSequence((1, 2), (3, 4, 5), (True,) * 3, (-3.0,) * 3, (1.0,) * 3, 1.0, 0)

    def loss(given: LossInput) -> LossOutput:
        return LossOutput(-given.logprobs_T * given.advantages_T)

    learner.update(Batch((sequence,)), loss)


@pytest.mark.parametrize("make", [shared, copying])
def test_how_far_updates_move_the_probe_is_told_for_each_update(make: Callable[..., SharedSync | CopySync]):
    learner, other = pair()
    engine, sync = TinyEngine(learner.model if make is shared else other), make(probe_first=3, probe_every=100)
    sequences = proof_settings(Sync(), VOCAB, "fp32").sequences

    def scores() -> list[float]:
        return [value for row in learner.logprobs(sequences) for value in row]

    before = scores()
    sync.push(learner, engine)
    assert sync.shift is None  # of a first probe
    sync.verify(learner, engine)
    assert sync.shift is None  # the weights are the same
    train(learner)
    first = scores()
    sync.push(learner, engine)
    assert sync.shift == pytest.approx(fmean(abs(a - b) for a, b in zip(before, first, strict=True)))
    assert sync.shift > 0
    train(learner)
    train(learner)
    sync.push(learner, engine)
    assert sync.shift == pytest.approx(fmean(abs(a - b) for a, b in zip(first, scores(), strict=True)) / 2)
    train(learner)
    sync.push(learner, engine)
    assert sync.shift is None  # no probe


# --- copy -----------------------------------------------------------------------------------------------------------
def test_copy_follows_the_learner_through_training():
    learner, other = pair()
    engine, sync = TinyEngine(other), copying()
    versions, prints = [], set()
    for _ in range(4):
        proof = sync.push(learner, engine)
        assert proof.passed
        assert engine.version == proof.version == learner.version
        assert proof.fingerprint == fingerprint(engine.weights()).combined
        assert engine.score([(3, 4, 5)]) == learner.logprobs([(3, 4, 5)])
        versions.append(proof.version)
        prints.add(proof.fingerprint)
        train(learner)
    assert versions == [0, 1, 2, 3]
    assert len(prints) == 4


def test_copy_sends_nothing_if_the_engine_is_already_there():
    learner, other = pair()
    engine, sync = TinyEngine(other), copying()
    first = sync.push(learner, engine)
    assert sync.sent == first.bytes
    second = sync.push(learner, engine)
    assert len(engine.loads) == 1
    assert sync.sent == 0
    assert (second.fingerprint, second.changed) == (first.fingerprint, 0)


def test_copy_sends_if_the_version_is_equal_but_the_weights_are_not():
    """As after a resume that restored other weights under the same number."""
    learner, other = pair()
    engine, sync = TinyEngine(other), copying()
    sync.push(learner, engine)
    learner.step()
    learner.version = 0
    assert sync.push(learner, engine).changed == 11
    assert len(engine.loads) == 2
    assert fingerprint(engine.weights()) == fingerprint(learner.weights())


def test_copy_sends_a_frozen_base_once_and_all_again_in_a_resync():
    learner, other = pair(BASE)
    engine, sync = FaultyEngine(other, on("lora_A.up", lambda tensor: tensor.flip(0)), times=0), copying(BASE)
    sync.push(learner, engine)
    learner.step()
    proof = sync.push(learner, engine)
    assert proof.changed == 4
    assert set(engine.loads[0]) >= BASE
    assert set(engine.loads[1]) == {name for name, _ in learner.weights()} - BASE
    learner.step()
    engine.times = 1
    assert sync.push(learner, engine).passed
    assert set(engine.loads[3]) >= BASE


def test_copy_holds_one_tensor_at_a_time():
    learner, other = pair()
    live: list[str] = []

    class Lazy(TinyLearner):
        def weights(self) -> WeightStream:
            for name, tensor in super().weights():
                live.append(name)
                assert len(live) == 1
                yield name, tensor.clone()
                live.remove(name)

    lazy = Lazy(learner.model)
    assert copying().push(lazy, TinyEngine(other)).passed


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "not sent": ("up.weight", lambda tensor: None, "stale"),
    "swapped rows": ("down.weight", swap_rows, "rows 3 and 5 are swapped"),
    "transposed": ("up.weight", lambda tensor: tensor.T, "transposed"),
    "one bit": ("embed.weight", flip_bit, "one bit of element [2, 7]"),
    "wrong adapter scaling": ("down.lora_scaling", lambda tensor: tensor / 2, "differs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lasting_fault_stops_the_run_after_one_resync(fault: str):
    name, change, kind = FAULTS[fault]
    learner, other = pair()
    engine, sync = FaultyEngine(other, on(name, change), times=0), copying()
    sync.push(learner, engine)
    learner.step()
    engine.times = 10
    with pytest.raises(SyncError) as caught:
        sync.push(learner, engine)
    assert f"{name}: " in caught.value.what
    assert kind in caught.value.what
    assert "after a second push" in caught.value.what
    assert "version 1" in caught.value.where
    assert engine.times == 8


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_healed_by_the_resync_and_logged(fault: str, caplog: pytest.LogCaptureFixture):
    name, change, kind = FAULTS[fault]
    learner, other = pair()
    engine, sync = FaultyEngine(other, on(name, change), times=0), copying(probe_first=0, probe_every=1000)
    sync.push(learner, engine)
    learner.step()
    engine.times = 1
    proof = sync.push(learner, engine)
    assert proof.passed
    assert proof.probe is not None  # a second proof looks at everything
    assert f"{name}: " in caplog.text
    assert kind in caplog.text


def test_an_engine_that_does_not_take_over_the_version_is_refused():
    class Lagging(TinyEngine):
        def load(self, weights: WeightStream, version: int) -> None:
            super().load(weights, max(0, version - 1))

    learner, other = pair()
    engine, sync = Lagging(other), copying()
    sync.push(learner, engine)
    learner.step()
    with pytest.raises(SyncError, match="version: engine 0, learner 1"):
        sync.push(learner, engine)


def test_a_long_list_of_tensors_is_cut_in_the_message():
    class Deaf(TinyEngine):
        def load(self, weights: WeightStream, version: int) -> None:
            self.version = version

    learner, other = pair()
    with pytest.raises(SyncError, match="and 3 more"):
        copying().push(learner, Deaf(other))


def test_probes_come_at_the_first_pushes_and_then_every_so_many():
    learner, other = pair()
    engine, sync = TinyEngine(other), copying(probe_first=2, probe_every=4)
    probed = []
    for _ in range(10):
        probed.append(sync.push(learner, engine).probe is not None)
        learner.step()
    assert [place for place, probe in enumerate(probed) if probe] == [0, 1, 4, 8]


def test_only_proven_weights_sample():
    learner, other = pair()
    engine, sync = TinyEngine(other), copying()
    request = Request("a", (1, 2), "g", 5, Sampling(max_tokens=4), version=0)
    with pytest.raises(StaleWeightsError):
        engine.submit([request])
    sync.push(learner, engine)
    engine.submit([request])
    (completion,) = engine.completed()
    expected = learner.logprobs([request.prompt_ids + completion.ids])[0][1:]
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)


# --- shared ---------------------------------------------------------------------------------------------------------
def test_shared_follows_the_learner_and_sends_nothing():
    model = TinyModel()
    learner, engine, sync = TinyLearner(model), TinyEngine(model), shared()
    first = sync.push(learner, engine)
    train(learner)
    second = sync.push(learner, engine)
    assert engine.loads == [[], []]
    assert (first.passed, second.passed) == (True, True)
    assert (first.changed, second.changed) == (-1, 11)
    assert engine.version == 1
    assert second.fingerprint == fingerprint(learner.weights()).combined


def test_shared_refuses_an_engine_with_a_copy_even_if_it_is_equal():
    model = TinyModel()
    twin = deepcopy(model)
    twin.down = model.down
    with pytest.raises(SyncError) as caught:
        shared().push(TinyLearner(model), TinyEngine(twin))
    assert "up.weight: not shared, the engine has a copy of it" in caught.value.what
    assert "down.weight" not in caught.value.what


def test_shared_asks_for_the_same_memory_read_in_the_same_way():
    values = np.ones((4, 4), np.float32)
    one, other = torch.from_numpy(values), torch.from_numpy(values)  # two storages over one memory
    assert _same_storage(one, one.detach())
    assert _same_storage(one, other)
    assert not _same_storage(one, one.clone())
    assert not any(_same_storage(one, part) for part in (one.T, one.view(torch.int32), one[:2], other.T, other[1:]))


def test_shared_compares_scalings_by_value():
    model = TinyModel()
    wrong = MisreportingEngine(model, on("up.lora_scaling", lambda tensor: tensor * 2))
    with pytest.raises(SyncError, match=r"up\.lora_scaling: differs"):
        shared().push(TinyLearner(model), wrong)


def test_shared_names_a_missing_tensor():
    model = TinyModel()
    engine = MisreportingEngine(model, on("head.bias", lambda tensor: None))
    with pytest.raises(SyncError, match=r"head\.bias: missing"):
        shared().push(TinyLearner(model), engine)


def test_shared_refuses_a_stream_that_repeats_a_name():
    model = TinyModel()

    def twice(stream: WeightStream) -> WeightStream:
        yield from stream
        yield "head.bias", model.head.bias

    with pytest.raises(SyncError, match=r"head\.bias twice"):
        shared().push(TinyLearner(model), MisreportingEngine(model, twice))


def test_a_base_changed_behind_everybodys_back_is_caught_at_the_end_of_the_run():
    model = TinyModel()
    learner, engine = TinyLearner(model, BASE), TinyEngine(model)
    sync = shared(BASE, probe_first=1, probe_every=1000)
    sync.push(learner, engine)
    model.up.weight.data[0, 0] += 1
    learner.step()
    assert sync.push(learner, engine).passed
    with pytest.raises(SyncError, match=r"up\.weight: not frozen"):
        sync.verify(learner, engine)


@pytest.mark.parametrize("transport", ["shared", "copy"])
def test_verify_proves_without_sending(transport: str):
    learner, other = pair()
    sync = shared() if transport == "shared" else copying()
    engine = TinyEngine(learner.model if transport == "shared" else other)
    sync.push(learner, engine)
    loads = len(engine.loads)
    assert sync.verify(learner, engine).probe is not None
    assert len(engine.loads) == loads
    learner.step()
    with pytest.raises(SyncError, match="version: engine 0, learner 1"):
        sync.verify(learner, engine)


# --- negative control -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", ["shared", "copy"])
def test_the_control_passes_and_leaves_every_bit_as_it_was(transport: str, dtype: torch.dtype):
    learner, other = pair(dtype=dtype)
    sync = shared() if transport == "shared" else copying()
    engine = TinyEngine(learner.model if transport == "shared" else other)
    sync.push(learner, engine)
    before = fingerprint(learner.weights())
    assert sync.negative_control(learner, engine) in before.tensors
    assert fingerprint(learner.weights()) == fingerprint(engine.weights()) == before
    assert sync.push(learner, engine).changed == 0


def test_a_control_before_the_first_push_does_not_count_as_a_proof():
    learner, other = pair()
    engine, sync = TinyEngine(other), copying()
    sync.negative_control(learner, engine)
    assert sync.push(learner, engine).changed == -1


@pytest.mark.parametrize("transport", ["shared", "copy"])
def test_the_control_falsifies_a_trained_tensor(transport: str):
    learner, other = pair(BASE)
    sync = shared(BASE) if transport == "shared" else copying(BASE)
    engine = TinyEngine(learner.model if transport == "shared" else other)
    sync.push(learner, engine)
    name = sync.negative_control(learner, engine)
    assert name not in BASE
    assert "scaling" not in name


def test_a_blind_proof_is_found_shared():
    """The engine shows a copy made at the start, so that it looks right whatever it samples with."""
    model = TinyModel()
    snapshot = deepcopy(model)
    engine = MisreportingEngine(model, lambda stream: snapshot.stream())
    with pytest.raises(SyncError, match="the proof does not detect wrong weights"):
        shared().negative_control(TinyLearner(model), engine)


def test_a_blind_proof_is_found_copy():
    """The engine echoes the learner's tensors instead of showing its own."""
    learner, other = pair()
    engine = MisreportingEngine(other, lambda stream: learner.weights())
    with pytest.raises(SyncError, match="the proof does not detect wrong weights"):
        copying().negative_control(learner, engine)
    assert fingerprint(TinyEngine(other).weights()) == fingerprint(learner.weights())


def test_a_control_whose_right_weights_fail_says_so():
    learner, other = pair()
    sync = copying()
    engine = FaultyEngine(other, lambda stream: stream, times=0)
    sync.push(learner, engine)

    class Once(FaultyEngine):
        def load(self, weights: WeightStream, version: int) -> None:
            super().load(weights, version)
            self.fault, self.times = on("head.bias", lambda tensor: tensor + 1), 1

    engine.__class__ = Once
    with pytest.raises(SyncError, match=r"after the negative control: head\.bias"):
        sync.negative_control(learner, engine)


def test_with_exact_numerics_one_bit_of_a_score_is_a_fault():
    class Rounding(TinyEngine):
        """Scores one token in the last bit otherwise."""

        def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
            (first, *rest), *others = super().score(sequences)
            return [(math.nextafter(first, 0), *rest), *others]

    learner, other = pair()
    for numerics in ("fp32", "exact"):
        sync = build_sync(Sync(transport="copy"), vocab=VOCAB, numerics=numerics)
        right = sync.push(learner, TinyEngine(other))
        assert right.probe is not None
        assert right.probe.tolerance == (0 if numerics == "exact" else 1e-4)
    with pytest.raises(SyncError, match=r"numerics\.exact failed"):
        sync.push(learner, Rounding(other))
