from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.config.schema import Sync
from lockstep.errors import SyncError
from lockstep.sync.compare import Fault, compare, explain
from lockstep.sync.fingerprint import Fingerprinter, fingerprint
from lockstep.sync.proof import ProofSettings, Readers, proof_settings, prove
from lockstep.types import Proof, TokenIds, WeightStream
from tests.sync.tiny import (
    BASE,
    HIDDEN,
    VOCAB,
    FaultyEngine,
    MisreportingEngine,
    TinyEngine,
    TinyLearner,
    flip_bit,
    on,
    pair,
    swap_rows,
)

SETTINGS = proof_settings(Sync(), VOCAB, "fp32")


def synced() -> tuple[TinyLearner, TinyEngine]:
    learner, other = pair()
    engine = TinyEngine(other)
    engine.load(learner.weights(), learner.version)
    return learner, engine


def proof_of(learner: TinyLearner, engine: TinyEngine, probe: bool = False) -> Proof:
    return prove(learner, engine, None, SETTINGS, probe).proof


def test_equal_weights_pass():
    learner, engine = synced()
    proof = proof_of(learner, engine, probe=True)
    assert proof.passed
    assert proof.mismatched == ()
    assert proof.tensors == len(list(learner.weights())) == 13
    assert proof.bytes == sum(tensor.nbytes for _, tensor in learner.weights())
    assert proof.fingerprint == fingerprint(engine.weights()).combined
    assert proof.changed == -1
    assert proof.probe is not None
    assert proof.probe.mean == 0.0
    assert proof.probe.tokens == 4 * 31
    assert proof.seconds > 0


def test_a_later_proof_counts_what_changed():
    learner, engine = synced()
    first = prove(learner, engine, None, SETTINGS, probe=False)
    again = prove(learner, engine, first.fingerprints, SETTINGS, probe=False)
    assert again.proof.changed == 0
    with torch.no_grad():
        learner.model.up.weight[0, 0] += 1
        learner.model.head.bias[3] += 1
    engine.load(learner.weights(), 0)
    third = prove(learner, engine, again.fingerprints, SETTINGS, probe=False)
    assert third.proof.passed
    assert third.proof.changed == 2
    assert third.proof.fingerprint != first.proof.fingerprint


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "swapped rows": ("down.weight", swap_rows, "down.weight: differs, rows 3 and 5 are swapped"),
    "transposed": (
        "up.weight",
        lambda tensor: tensor.T,
        "up.weight: transposed, the learner's tensor with rows and columns exchanged",
    ),
    "transposed shape": (
        "head.weight",
        lambda tensor: tensor.T,
        "head.weight: transposed, the learner's tensor with rows and columns exchanged",
    ),
    "one bit": ("embed.weight", flip_bit, "embed.weight: differs, one bit of element [2, 7]"),
    "sign bit": ("up.bias", lambda tensor: tensor * (1 - 2 * (torch.arange(HIDDEN) == 4)), "one bit of element [4]"),
    "one element": ("up.bias", lambda tensor: tensor + (torch.arange(HIDDEN) == 4), "one element, [4]"),
    "scaled": ("up.bias", lambda tensor: 2 * tensor, "up.bias: differs, 16 of 16 elements, the first is [0]"),
    "wrong adapter scaling": ("down.lora_scaling", lambda tensor: tensor / 2, "down.lora_scaling: differs"),
    "missing": ("lora_A.up", lambda tensor: None, "lora_A.up: missing, the engine does not have it"),
    "wrong dtype": ("up.weight", lambda tensor: tensor.bfloat16(), "up.weight: dtype, bfloat16 instead of float32"),
    "wrong shape": ("up.bias", lambda tensor: tensor[1:], "up.bias: shape, [15] instead of [16]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault: str):
    name, change, expected = FAULTS[fault]
    learner, _ = pair()
    engine = MisreportingEngine(deepcopy(learner.model), on(name, change))
    engine.version = 0
    proof = proof_of(learner, engine)
    assert not proof.passed
    assert len(proof.mismatched) == 1
    assert proof.mismatched[0].startswith(f"{name}: ")
    assert expected in proof.mismatched[0]


def test_an_extra_tensor_is_named():
    learner, _ = pair()

    def more(stream: WeightStream) -> WeightStream:
        yield from stream
        yield "ghost", torch.zeros(2)

    engine = MisreportingEngine(deepcopy(learner.model), more)
    engine.version = 0
    proof = proof_of(learner, engine)
    assert proof.mismatched == ("ghost: extra, the learner does not have it",)
    assert proof.tensors == 14


def test_a_stale_tensor_is_named():
    learner, engine = synced()
    first = prove(learner, engine, None, SETTINGS, probe=False)
    learner.step()
    stale = FaultyEngine(engine.model, on("up.weight", lambda tensor: None))
    stale.load(learner.weights(), learner.version)
    proof = prove(learner, stale, first.fingerprints, SETTINGS, probe=False).proof
    assert proof.mismatched == ("up.weight: stale, still the tensor of the last proof",)


def test_a_version_behind_is_named_though_the_weights_are_equal():
    learner, engine = synced()
    learner.version = 7
    proof = proof_of(learner, engine)
    assert proof.mismatched == ("version: engine 0, learner 7",)
    assert proof.version == 7


def test_every_tensor_is_listed_when_nothing_was_sent():
    learner, other = pair()
    engine = TinyEngine(other)
    proof = proof_of(learner, engine)
    names = {entry.split(":")[0] for entry in proof.mismatched}
    assert names == {"version"} | {name for name, _ in learner.weights() if "scaling" not in name}


def test_nan_weights_equal_themselves_and_fail_the_probe():
    learner, engine = synced()
    with torch.no_grad():
        learner.model.up.weight[0, 0] = math.nan
    engine.load(learner.weights(), 0)
    assert proof_of(learner, engine).passed
    proof = proof_of(learner, engine, probe=True)
    assert proof.mismatched == ()
    assert proof.probe is not None
    assert math.isnan(proof.probe.mean)
    assert not proof.passed


def test_the_probe_sees_an_engine_that_scores_with_other_weights_than_it_shows():
    class Cached(TinyEngine):
        """Keeps sampling with a copy made long ago, as engines with repacked weights have done."""

        def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
            return TinyEngine(self.packed).score(sequences)

    learner, other = pair()
    engine = Cached(other)
    engine.packed = deepcopy(other)
    engine.load(learner.weights(), 0)
    assert proof_of(learner, engine).passed
    proof = proof_of(learner, engine, probe=True)
    assert proof.mismatched == ()
    assert proof.probe is not None
    assert proof.probe.mean > 0.1
    assert proof.probe.mean < proof.probe.p99 <= proof.probe.max
    assert not proof.passed


def test_the_probe_is_the_mean_and_the_99th_percentile_of_absolute_differences():
    class Off(TinyEngine):
        def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
            rows = super().score(sequences)
            return [tuple(value - 0.001 * place for place, value in enumerate(row)) for row in rows]

    learner, other = pair()
    engine = Off(other)
    engine.load(learner.weights(), 0)
    settings = ProofSettings((tuple(place % VOCAB for place in range(201)),), tolerance=0.1)
    probe = prove(learner, engine, None, settings, probe=True).proof.probe
    assert probe is not None
    assert probe.tokens == 200
    assert probe.mean == pytest.approx(0.0995, rel=1e-4)  # the mean of 0, 0.001 … 0.199
    assert probe.p99 == pytest.approx(0.197, rel=1e-4)  # the 198th of 200
    assert probe.max == pytest.approx(0.199, rel=1e-4)


def test_a_score_of_another_length_is_refused():
    class Short(TinyEngine):
        def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
            return [row[1:] for row in super().score(sequences)]

    learner, other = pair()
    engine = Short(other)
    engine.load(learner.weights(), 0)
    with pytest.raises(SyncError, match=r"engine\.score: the call returned \[30, 30, 30, 30\]"):
        proof_of(learner, engine, probe=True)


@given(st.data())
def test_any_flipped_bit_anywhere_is_caught_and_named(data: st.DataObject):
    learner, _ = pair()
    sizes = {name: tensor.numel() for name, tensor in learner.weights()}
    name = data.draw(st.sampled_from(sorted(sizes)))
    element, bit = data.draw(st.integers(0, sizes[name] - 1)), data.draw(st.integers(0, 31))

    def flip(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.uint8).view(-1)
        bits[4 * element + bit // 8] ^= 1 << bit % 8
        return tensor

    engine = MisreportingEngine(learner.model, on(name, flip))
    engine.version = 0
    (entry,) = proof_of(learner, engine).mismatched
    assert entry.startswith(f"{name}: differs, ")
    assert "one bit" in entry or sizes[name] == 1


def test_differences_of_many_tensors_are_all_named_though_not_all_explained():
    ours = {f"w{i:02}": torch.full((3,), float(i)) for i in range(40)}
    theirs = {name: tensor + 1 for name, tensor in ours.items()}
    found = compare(fingerprint(iter(ours.items())), fingerprint(iter(theirs.items())))
    explained = explain(found, iter(ours.items()), iter(theirs.items()))
    assert [entry.name for entry in explained] == sorted(ours)
    assert {entry.fault for entry in explained} == {Fault.DIFFERS}
    assert sum("3 of 3 elements" in entry.detail for entry in explained) == 16


def test_a_frozen_tensor_that_was_trained_is_caught_at_the_probe():
    """The guard looks at torch's counter of changes; a write through .data passes it until everything is read again."""
    learner, _ = pair(BASE)
    engine = TinyEngine(learner.model)
    engine.version = 0
    readers = Readers(Fingerprinter(BASE), Fingerprinter(BASE), shared=True)
    first = prove(learner, engine, None, SETTINGS, probe=True, readers=readers)
    assert first.proof.passed
    learner.model.up.weight.data[0, 0] += 1
    between = prove(learner, engine, first.fingerprints, SETTINGS, probe=False, readers=readers)
    assert between.proof.passed
    assert between.proof.changed == 0
    probed = prove(learner, engine, first.fingerprints, SETTINGS, probe=True, readers=readers)
    assert probed.proof.mismatched == ("up.weight: not frozen, it changed since the first proof",)
    assert probed.proof.changed == 1


def test_probe_sequences_are_fixed_and_avoid_special_ids():
    sync = Sync(probe_sequences=3, probe_tokens=20)
    special = {0, 1, 2, 30}
    drawn = proof_settings(sync, VOCAB, "bf16", special)
    assert drawn == proof_settings(sync, VOCAB, "bf16", special)
    assert [len(ids) for ids in drawn.sequences] == [20, 20, 20]
    assert len(set(drawn.sequences)) == 3
    assert {token for ids in drawn.sequences for token in ids} <= set(range(VOCAB)) - special
    assert drawn.tolerance == 0.03
    assert proof_settings(sync, VOCAB, "fp32").tolerance == 1e-4


def test_the_limit_of_another_engine_follows_from_what_rounding_does_to_the_model():
    asked: list[Sequence[TokenIds]] = []

    def rounding(sequences: Sequence[TokenIds]) -> float:
        asked.append(sequences)
        return 0.07

    drawn = proof_settings(Sync(), VOCAB, "bf16", rounding=rounding)
    assert drawn.tolerance == 0.14
    assert asked == [drawn.sequences]
    assert proof_settings(Sync(), VOCAB, "bf16", rounding=lambda _: 0.001).tolerance == 0.03
    assert proof_settings(Sync(), VOCAB, "fp32", rounding=rounding).tolerance == 1e-4


def test_probe_sequences_use_special_ids_if_there_are_no_others():
    drawn = proof_settings(Sync(), 3, "fp32", {0, 1, 2})
    assert {token for ids in drawn.sequences for token in ids} == {0, 1, 2}
