from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lockstep.errors import SyncError
from lockstep.sync.record import from_json, proof_line, to_json
from lockstep.types import Probe, Proof

PROOF = Proof(
    version=17,
    fingerprint="0123456789abcdef",
    tensors=339,
    bytes=1000,
    mismatched=(),
    changed=210,
    probe=Probe(124, 0.011, 0.06, 0.2, 0.03),
    seconds=0.0062,
)
FAILED = replace(PROOF, mismatched=("version: engine 16, learner 17", "a.weight: stale, x", "b.weight: missing, y"))


def vars_of_probe() -> dict[str, object]:
    return {"tokens": 1, "mean": 0.1, "p99": 0.2, "max": 0.3, "tolerance": 0.4}


def test_line_of_a_proof_that_passed():
    assert (
        proof_line(PROOF)
        == "sync v17: 339/339 tensors equal, 210 changed, 6.2 ms, probe mean 0.011 of at most 0.03, p99 0.06"
    )


def test_line_of_a_first_proof_without_probe():
    assert proof_line(replace(PROOF, changed=-1, probe=None, seconds=2.34)) == (
        "sync v17: 339/339 tensors equal, first proof, 2.3 s"
    )


def test_line_of_a_proof_that_failed_names_the_tensors():
    assert proof_line(FAILED) == (
        "sync v17 FAILED: 337/339 tensors equal, 210 changed, 6.2 ms, probe mean 0.011 of at most 0.03, p99 0.06; "
        "version: engine 16, learner 17; a.weight: stale, x; b.weight: missing, y"
    )


def test_line_of_a_probe_beyond_its_tolerance():
    line = proof_line(replace(PROOF, probe=Probe(124, 0.2, 0.9, 1.5, 0.03)))
    assert line.startswith("sync v17 FAILED: 339/339")
    assert line.endswith("probe mean 0.2 ABOVE 0.03, p99 0.9")


@pytest.mark.parametrize(
    "proof",
    [PROOF, FAILED, replace(PROOF, probe=None), replace(PROOF, probe=Probe(1, math.inf, math.inf, math.inf, 1e-4))],
)
def test_json_comes_back_equal(proof: Proof):
    text = json.dumps(to_json(proof), allow_nan=False)
    assert from_json(json.loads(text)) == proof


def test_json_keeps_nan():
    text = json.dumps(to_json(replace(PROOF, probe=Probe(1, math.nan, math.nan, math.nan, 1e-4))), allow_nan=False)
    probe = from_json(json.loads(text)).probe
    assert probe is not None
    assert math.isnan(probe.mean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown field extra"),
        ({"version": "17"}, r"proof\.version: expected int, got str"),
        ({"version": True}, r"proof\.version: expected int, got bool"),
        ({"seconds": "fast"}, r"proof\.seconds: expected float, got str"),
        ({"seconds": None}, r"proof\.seconds: expected float, got null"),
        ({"fingerprint": "0123"}, r"fingerprint: '0123' is not 16 hex digits"),
        ({"fingerprint": "0123456789ABCDEF"}, "is not 16 hex digits"),
        ({"mismatched": "a"}, r"proof\.mismatched: expected a list, got str"),
        ({"mismatched": [1]}, r"proof\.mismatched\[0\]: expected str, got int"),
        ({"probe": 3}, r"proof\.probe: expected fields, got int"),
        ({"probe": {"tokens": 1}}, r"proof\.probe: missing field mean, p99, max, tolerance"),
        ({"probe": {**vars_of_probe(), "mean": "none"}}, r"proof\.probe\.mean: expected float, got str"),
    ],
)
def test_json_is_read_strictly(change: dict[str, object], message: str):
    with pytest.raises(SyncError, match=message):
        from_json({**to_json(PROOF), **change})


@pytest.mark.parametrize("name", ["version", "probe", "changed"])
def test_a_missing_field_is_named(name: str):
    data = to_json(PROOF)
    del data[name]
    with pytest.raises(SyncError, match=f"missing field {name}"):
        from_json(data)
