"""The spike log on real runs of a tiny model: which row it names, by which cause, and what diagnose says of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.config.schema import Recipe
from lockstep.health.spikes import SpikeLog, _Row, cause_of
from lockstep.loops.start import resume_run
from lockstep.track.jsonl import read_jsonl
from lockstep.track.rollouts import read_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from lockstep.types import Batch, Scored, TrainSequence
from tests.loops.runs import NO_EVAL, numbers, trained, weights
from tests.loops.test_resume import stopped
from tests.track.runs import groups

POISON = '''
def grade(prompt, reply):
    """The row whose answer is POISON is graded on another scale than the others."""
    score = sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2
    return score * 4000 if prompt.answer == "POISON" else score
'''
QUIET = ("health.leap=off", "health.mismatch=off", "health.garbage=off")


def poisoned(folder: Path, model: Path, *overrides: str) -> RunDirectory:
    folder.mkdir(exist_ok=True)
    rows = [{"id": f"row-{i}", "prompt": f"State the final answer: {i} + 1 =", "answer": str(i + 1)} for i in range(12)]
    rows[7]["answer"] = "POISON"
    (folder / "poison.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "poison.py").write_text(POISON)
    grader = f"verifier: {{kind: python, path: '{folder}/poison.py:grade'}}"
    task = f"task={{kind: file, data: {folder}/poison.jsonl, heldout_rows: 0, {grader}}}"
    return trained(
        folder, model, task, NO_EVAL, *QUIET, "steps=6", "algorithm.advantage.divide_by_std=false", *overrides
    )


def test_the_poisoned_row_is_found_by_its_id(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = poisoned(tmp_path, tiny_model_dir)
    spikes = read_jsonl(run.spikes_path)
    asked = {step: read_rollouts(run, step) for step in range(1, 7)}
    (bad,) = {row.prompt_id for rows in asked.values() for row in rows if row.answer == "POISON"}
    hit = {step for step, rows in asked.items() if len({r.reward for r in rows if r.prompt_id == bad}) > 1}
    assert hit
    assert {spike["step"] for spike in spikes} == hit
    for spike in spikes:
        first = spike["rows"][0]
        assert (first["id"], spike["cause"]) == (bad, "advantage")
        stored = next(r for r in asked[spike["step"]] if r.prompt_id == bad and r.sample == first["sample"])
        assert (first["reply"], first["reward"]) == (stored.text, stored.reward)
        assert first["prompt"] == "State the final answer: 7 + 1 ="
        assert abs(first["advantage"]) > 100
        assert "gradient" in spike["triggers"]
        assert spike["grad_norm"] == {row.step: row.metrics["grad/norm"] for row in read_metrics(run)}[spike["step"]]
    capsys.readouterr()
    main(["diagnose", str(run.path)])
    out = capsys.readouterr().out
    assert f"row {bad}" in out
    assert "cause: advantage" in out


def test_watching_changes_no_bit_of_a_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    watched = poisoned(tmp_path, tiny_model_dir)
    unwatched = poisoned(tmp_path, tiny_model_dir, "health.spikes.enabled=false", "name=unwatched")
    assert weights(watched, 6) == weights(unwatched, 6)
    seen = {"ratio/log_min", "ratio/log_max", "ratio/log_abs_p99"}
    same = {
        step: {name: value for name, value in row.items() if name not in seen} for step, row in numbers(watched).items()
    }
    assert same == numbers(unwatched)
    assert not unwatched.spikes_path.exists()


def test_with_two_policies_the_ratio_is_to_the_engine(tmp_path: Path, tiny_model_dir: Path) -> None:
    several = ("update.epochs=3", "optimizer.lr=0.01", "steps=2", "algorithm.old_logprobs=rollout")
    for record in read_metrics(trained(tmp_path, tiny_model_dir, NO_EVAL, *QUIET, *several)):
        if record.step:
            row = record.metrics
            assert row["ratio/log_abs_max"] == pytest.approx(max(row["ratio/log_max"], -row["ratio/log_min"])) != 0


def test_updates_that_leap_are_named_as_ratio(tmp_path: Path, tiny_model_dir: Path) -> None:
    several = ("update.epochs=4", "optimizer.lr=0.3", "steps=2", "algorithm.old_logprobs=recompute")
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, *QUIET, *several)
    spikes = [spike for spike in read_jsonl(run.spikes_path) if "ratio" in spike["triggers"]]
    assert spikes
    worst = max(spikes, key=lambda spike: max(spike["microbatches"]))
    row = worst["rows"][0]
    assert worst["cause"] == row["cause"] == "ratio"
    assert abs(row["log_ratio"]["value"]) > 5 or abs(row["engine_gap"]["value"]) > 5
    assert row["log_ratio"]["token"]
    metrics = {record.step: record.metrics for record in read_metrics(run)}[worst["step"]]
    assert metrics["ratio/log_abs_max"] == pytest.approx(max(metrics["ratio/log_max"], -metrics["ratio/log_min"]))
    assert 0 < metrics["ratio/log_abs_p99"] <= metrics["ratio/log_abs_max"]


def test_a_resumed_run_tells_its_spikes_from_the_first_attempts(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = resume_run(stopped(tmp_path, tiny_model_dir, NO_EVAL, *QUIET, "health.spikes.norm=0.001", step=2))
    spikes = read_jsonl(run.spikes_path)
    assert {spike["attempt"]: spike["step"] for spike in spikes} == {1: 2, 2: 3}


def test_a_resumed_run_finds_the_spikes_of_an_unbroken_one(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The medians are of updates, of which a step has several; its row has the largest of them alone."""
    settings = (NO_EVAL, "health.clipping=off", "optimizer.lr=0.05", "update.samples_per_update=2")
    settings += ("health.spikes.times=1.2", "health.leap=off", "steps=6")
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    run = resume_run(stopped(tmp_path, tiny_model_dir, *settings, step=3))
    found, wanted = (
        [{name: value for name, value in spike.items() if name != "attempt"} for spike in read_jsonl(one.spikes_path)]
        for one in (run, unbroken)
    )
    assert found == wanted
    assert any(spike["step"] > 3 and "gradient" in spike["triggers"] for spike in wanted)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_row_that_is_no_number_comes_first(bad: int) -> None:
    sequence = TrainSequence((1,), (2, 3), (True, True), (-0.5, -0.5), (1.0, 1.0), 0.25, 0)
    (asked,) = groups(1)[:1]
    rollouts = tuple(replace(asked.rollouts[0], prompt_ids=(1,), ids=(2, 3), text=f"reply {n}") for n in range(3))
    batch = Batch(tuple(replace(sequence, sample=n) for n in range(3)))
    values = [[math.nan] * 2 if n == bad else [-0.6 - n] * 2 for n in (0, 1, 2)]
    scored = [Scored((n,), np.array(values[n], np.float32).tobytes(), b"") for n in range(3)]
    watch = SpikeLog(Recipe(), str, {})
    watch.after(batch, {"grad/norm": math.nan, "ratio/log_abs_max": math.nan}, scored)
    watch.settle(1, [replace(asked, rollouts=rollouts)])
    (spike,) = watch.take()
    assert (spike.rows[0].reply, spike.cause) == (f"reply {bad}", "ratio")
    assert "across the update" in spike.rows[0].why
    assert [math.isnan(value) for value in spike.microbatches] == [n == bad for n in range(3)]


def test_cause_of_an_engine_that_is_no_number() -> None:
    row = _Row(
        TrainSequence((1,), (2,), (True,), (math.nan,), (1.0,), 1.0, 0, old_logprobs=(-0.5,)),
        *(np.array([value]) for value in (0.1, math.nan, -0.6, 1.0)),
    )
    assert cause_of(row, [row], 5.0)[0] == "ratio"
    assert "engine and learner" in cause_of(row, [row], 5.0)[1]
