"""Records that travel between processes arrive equal to the last bit, and nothing but plain values travels."""

from __future__ import annotations

import inspect
import math
import pickle
import pickletools
import re
import struct
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from lockstep.algorithms.correction import Mismatch
from lockstep.cluster import process_workers, wire
from lockstep.cluster.host import SAMPLER, TRAINER
from lockstep.learner.protocol import Share
from lockstep.learner.statistics import Piece
from lockstep.plain_values import _codec, from_plain, kinds_of, to_plain
from lockstep.scoring.workers import Evaluator
from lockstep.sync.fingerprint import Fingerprints, TensorPrint
from lockstep.types import (
    Batch,
    Completion,
    FinishReason,
    Forward,
    LossInput,
    NormNoise,
    Request,
    Sampling,
    Scored,
    TrainSequence,
    repeated,
)
from tests.learner.batches import make_batch

Rows, Values = tuple[tuple[int, ...], ...], list[tuple[float, ...]]
Sequences, Tables = list[TrainSequence], list[dict[str, list[float]]]
REQUEST = Request("sum/1#0", (5, 2**40), "sum/1", -(2**62), Sampling(8, 0.7, stop=("a", "ü")), 3, 1)


def classes_in(plain: Any) -> list[object]:
    """Classes and functions that a pickle of the values would name."""
    return [arg for code, arg, _ in pickletools.genops(pickle.dumps(plain)) if "GLOBAL" in code.name]


def test_a_batch_arrives_as_it_was_sent() -> None:
    for batch in (make_batch(), make_batch(old=False, ref=False)):
        plain = to_plain(Batch, batch)
        assert classes_in(plain) == []
        assert from_plain(Batch, plain) == batch


def test_fingerprints_arrive_as_they_were_sent() -> None:
    shape = (3, 2)
    prints = {name: TensorPrint(value, "bfloat16", shape, 12) for name, value in (("a", 0), ("b", 2**64 - 1))}
    sent = Fingerprints({**prints, "c": TensorPrint(5, "float64", (), 8)})
    found = from_plain(Fingerprints, wire.loads(wire.dumps(to_plain(Fingerprints, sent))))
    assert found == sent
    assert found.combined == sent.combined
    assert found != Fingerprints(prints)


def test_numbers_keep_their_bits() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]
    sent = Completion(REQUEST, (1, 2, 3, 4), (-0.0, math.inf, 5e-324, odd), FinishReason.LENGTH, 3)
    found = from_plain(Completion, to_plain(Completion, sent))
    assert found.finish is FinishReason.LENGTH
    assert [struct.pack("<d", x) for x in found.logprobs] == [struct.pack("<d", x) for x in sent.logprobs]
    assert found.request == REQUEST


def test_numbers_that_are_all_alike_travel_as_one_and_keep_their_bits() -> None:
    other = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]
    for numbers in ((0.1,) * 512, (other, math.nan), (other,) * 2, (0.0,) * 3, (-0.0, 0.0), (1e300,) * 4, (0.5,), ()):
        (found,) = from_plain(Values, to_plain(Values, [numbers]))
        assert [struct.pack("<d", x) for x in found] == [struct.pack("<d", x) for x in numbers]
    for ids in ((7,) * 512, (2**40,) * 3, (7, 8), (7,), ()):
        assert from_plain(Rows, to_plain(Rows, [ids])) == (ids,)
    assert len(wire.dumps(to_plain(Values, [(0.1,) * 512]))) < 40


def test_what_is_remembered_of_one_type_is_not_taken_for_another() -> None:
    for _ in range(2):
        assert [type(x) for x in from_plain(Values, to_plain(Values, [(1.0,) * 3]))[0]] == [float] * 3
        assert [type(x) for x in from_plain(Rows, to_plain(Rows, [(1,) * 3]))[0]] == [int] * 3
        (sequence, *_) = from_plain(Batch, to_plain(Batch, make_batch(masked=False))).sequences
        assert {type(x) for x in sequence.trained} == {bool}


def test_replies_of_a_group_share_their_prompt_where_they_arrive() -> None:
    first, *others = make_batch().sequences
    sent = [first, *(replace(one, prompt_ids=first.prompt_ids) for one in others), first]
    found = from_plain(Sequences, to_plain(Sequences, sent))
    assert found == sent
    assert len({id(one.prompt_ids) for one in found}) == 1
    assert found[0] is found[-1]


def test_lists_and_mappings_of_any_length_arrive() -> None:
    for sent in ([], [{}], [{"a": [], "b": [1.5, 2.5]}, {}, {"a": [0.5]}]):
        assert from_plain(Tables, to_plain(Tables, sent)) == sent
    one, *_ = (found := from_plain(Tables, to_plain(Tables, [row := {"a": [1.5]}, row])))
    one["a"].append(2.5)
    assert found == [{"a": [1.5, 2.5]}, {"a": [1.5]}]  # what can change is not shared


def test_a_number_that_no_code_holds_is_refused() -> None:
    with pytest.raises(struct.error):
        to_plain(Rows, [(1, 2**63)])


def test_optional_and_nested_records_arrive() -> None:
    forward = Forward("mxfp4-w4a4", NormNoise(0.1, 7, ("a", "b"), (1.0, 2.0)))
    assert from_plain(Forward, to_plain(Forward, forward)) == forward
    assert from_plain(Forward, to_plain(Forward, Forward())) == Forward()


def test_a_share_of_an_update_arrives_with_its_arrays() -> None:
    mismatch = Mismatch(3, 1, {"mismatch/k1": 0.1}, 0.5, 2.0, (1.0, 2.0), (3.0, 4.0))
    piece = Piece(4, 3, 9, -0.25, {"entropy/mean": 1.0}, {}, mismatch, Scored((4, 0), b"\x00\x02", b"\x00\x01"))
    sent = Share((piece,), 0.5, True, 0, 1e-3, 1)
    found = from_plain(Share, to_plain(Share, sent))
    assert found == sent


@pytest.mark.parametrize("worker", [TRAINER, SAMPLER, f"{Evaluator.__module__}:{Evaluator.__name__}"])
def test_all_that_a_worker_takes_and_returns_can_be_sent(worker: str) -> None:
    methods = inspect.getmembers(resolve_name(worker), inspect.isfunction)
    for name in (name for name, _ in methods if not name.startswith("_")):
        kinds, result = kinds_of(worker, name)
        for kind in (*kinds.values(), result):
            _codec(kind)


def test_all_that_the_driver_calls_exists_and_can_be_sent() -> None:
    source = "".join(path.read_text() for path in Path(process_workers.__file__).parent.glob("*.py"))
    called = set(re.findall(r"""\.call(?:_one)?\([^"()]*"([a-z_.]+)\"""", source))
    parts = {name for name in called if "." in name}
    assert len(parts) == 9
    assert len(called - parts) > 10
    for name in called:
        kinds, result = kinds_of(TRAINER, name)
        for kind in (*kinds.values(), result):
            _codec(kind)


def test_arguments_and_results_travel_as_their_method_names_them() -> None:
    kinds, result = kinds_of(TRAINER, "learner.prepare_numerics")
    assert list(kinds) == ["numeric"]
    assert from_plain(result, to_plain(result, (3, ("a", "b")))) == (3, ("a", "b"))
    kinds, _ = kinds_of(TRAINER, "learner.response_logprobs")
    assert list(kinds) == ["sequences", "temperature", "reference", "prefix"]
    sequences = make_batch().sequences
    assert from_plain(kinds["sequences"], to_plain(kinds["sequences"], list(sequences))) == sequences


def test_a_record_that_is_not_plain_is_refused() -> None:
    with pytest.raises((TypeError, NameError)):
        to_plain(LossInput, None)


def test_equal_numbers_of_equal_count_are_one_object_and_zeros_keep_their_sign():
    assert repeated(0.5, 3) == (0.5, 0.5, 0.5)
    assert repeated(0.5, 3) is repeated(0.5, 3)
    assert [math.copysign(1, one) for zero in (0.0, -0.0) for one in repeated(zero, 2)] == [1, 1, -1, -1]
