from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import RunDirectoryError
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import RunWriter, StepRecord, lineage, proof_from_json, read_events, read_metrics
from tests.track.runs import FACTS, RECIPE, proof

WRITE_AND_DIE = """
import os, sys
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import RunWriter
run = RunDirectory.resume(sys.argv[1], {})
writer = RunWriter(run)
for step in range(1, 4):
    writer.step(step, {"reward/mean": step / 10})
with open(run.metrics_path, "ab") as file:
    file.write(b'{"step": 4, "attem')
os.kill(os.getpid(), 9)
"""


def test_a_row_comes_back_as_it_was_written(tmp_path: Path) -> None:
    values = {"reward/mean": 0.1 + 0.2, "grad/norm": math.inf, "loss/policy": math.nan, "batch/samples": 64}
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run, RunWriter(run) as writer:
        written = writer.step(3, {**values, "length/mean": np.float32(0.5)}, proof(7))
        assert read_metrics(run)[0].metrics["reward/mean"] == 0.1 + 0.2  # on disk already
    (record,) = read_metrics(RunDirectory.open(tmp_path / "a"))
    assert (record.step, record.attempt, record.time) == (3, 1, written.time)
    assert math.isnan(record.metrics.pop("loss/policy"))
    assert record.metrics == {
        "reward/mean": 0.1 + 0.2,
        "grad/norm": math.inf,
        "batch/samples": 64.0,
        "length/mean": 0.5,
    }
    assert record.proof is not None
    assert record.proof["passed"] is True
    assert proof_from_json(record.proof) == proof(7)
    json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail)


def test_a_proof_with_a_probe_that_is_not_finite_survives(tmp_path: Path) -> None:
    bad = proof(7, mean=math.inf, mismatched=("model.norm.weight: values differ",))
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run, RunWriter(run) as writer:
        record = writer.step(1, {}, bad)
    assert record.proof is not None
    assert record.proof["passed"] is False
    assert proof_from_json(read_metrics(run)[0].proof or {}) == bad


def test_text_is_not_a_metric(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run, RunWriter(run) as writer:
        with pytest.raises(TypeError, match="answer/correct"):
            writer.step(1, {"answer/correct": "0.5"})  # type: ignore[dict-item]
        assert read_metrics(run) == []


def test_a_reader_gets_no_writer(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "a", RECIPE, FACTS).close()
    with pytest.raises(RunDirectoryError, match="reading only"):
        RunWriter(RunDirectory.open(tmp_path / "a"))


def test_after_kill_9_in_a_write_the_next_attempt_continues_and_says_what_it_found(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "a", RECIPE, FACTS).close()
    died = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(tmp_path / "a")], check=False)
    assert died.returncode == -9
    assert [record.step for record in read_metrics(RunDirectory.open(tmp_path / "a"))] == [1, 2, 3]
    with RunDirectory.resume(tmp_path / "a", FACTS) as run, RunWriter(run) as writer:
        writer.step(3, {"reward/mean": 0.9})
        writer.step(4, {"reward/mean": 1.0})
    records = read_metrics(RunDirectory.open(tmp_path / "a"))
    rows = [(r.step, r.attempt, r.metrics["reward/mean"]) for r in records]
    assert rows == [(1, 2, 0.1), (2, 2, 0.2), (3, 3, 0.9), (4, 3, 1.0)]
    taken, torn = read_events(run)
    assert (taken.kind, taken.attempt) == ("lock_taken_over", 3)
    assert taken.facts["holder"]["pid"] != os.getpid()
    assert (torn.kind, torn.facts) == ("torn_line", {"file": "metrics.jsonl", "bytes": 18})
    assert (run.path / "metrics.jsonl.torn").read_bytes() == b'{"step": 4, "attem\n'


def row(step: int, attempt: int, **metrics: float) -> StepRecord:
    return StepRecord(step, attempt, "2026-11-21T03:30:00.000Z", metrics)


def test_the_last_attempt_wins_step_by_step() -> None:
    rows = [row(1, 1, x=1), row(2, 1, x=2), row(3, 1, x=3), row(3, 2, x=30), row(4, 2, x=40)]
    assert [(r.step, r.metrics["x"]) for r in lineage(rows)] == [(1, 1), (2, 2), (3, 30), (4, 40)]


def test_rows_of_weights_that_no_longer_exist_are_left_out() -> None:
    rows = [row(1, 1), row(2, 1), row(3, 1), row(4, 1), row(2, 2)]
    assert [(r.step, r.attempt) for r in lineage(rows)] == [(1, 1), (2, 2)]


def test_rows_of_one_step_and_attempt_are_merged() -> None:
    (merged,) = lineage(
        [StepRecord(5, 1, "a", {"x": 1, "y": 2}, {"version": 5}), StepRecord(5, 1, "b", {"y": 3, "z": 4})]
    )
    assert merged == StepRecord(5, 1, "b", {"x": 1, "y": 3, "z": 4}, {"version": 5})


def test_events_keep_their_facts_and_a_foreign_row_is_named(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run, RunWriter(run) as writer:
        writer.event("skipped", "gradient not finite", step=4, norm=math.inf, prompts=("sums/1", "sums/2"))
    (event,) = read_events(run)
    assert (event.kind, event.step, event.message) == ("skipped", 4, "gradient not finite")
    assert event.facts == {"norm": "inf", "prompts": ["sums/1", "sums/2"]}
    run.events_path.write_text('{"kind": "x"}\n')
    with pytest.raises(RunDirectoryError, match=r"events\.jsonl:1"):
        read_events(run)
    run.metrics_path.write_text('{"step": 1, "attempt": 1, "time": "", "metrics": {"x": "y"}, "proof": null}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:1"):
        read_metrics(run)
