"""Real runs that their own rules stop: what they leave, what they say, and how they go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.checkpoint.store import list_checkpoints
from lockstep.cli import main
from lockstep.config.load import load
from lockstep.config.schema import ToolTask
from lockstep.errors import ConfigError, HealthStop, SyncError
from lockstep.loops.checks import check_garbage
from lockstep.loops.start import resume_run
from lockstep.tasks.build import build_task
from lockstep.track.rollouts import read_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events, read_metrics
from tests.loops import sft_runs
from tests.loops.runs import NO_EVAL, events, numbers, recipe, trained, weights, words
from tests.loops.test_resume import stopped

CLIPPED = (
    NO_EVAL, "steps=6", "save.every=6", "optimizer.max_grad_norm=0.001", "health.clipping={limit: 400, steps: 3, within: 3}",
)  # fmt: skip
"""Norms of 1 to 3 against a clip norm of 0.001: the rule is broken from the first step on."""


def health_events(run: RunDirectory) -> list[tuple[int | None, object, object]]:
    """Leave out that every reply is cut off: the tiny model never ends one."""
    found = [(e.step, e.facts["rule"], e.facts["tier"]) for e in read_events(run) if e.kind == "health"]
    return [event for event in found if event[1] != "truncation"]


def test_a_run_that_its_gradients_stop_is_saved_reported_and_says_how_to_go_on(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words(tmp_path, tiny_model_dir, *CLIPPED)]) == 3
    run = RunDirectory.open(tmp_path / "runs" / "run")
    assert [row.step for row in read_metrics(run)] == [1, 2, 3]
    assert [info.step for info in list_checkpoints(run.path) if info.complete] == [3]  # save.every would be 6
    norms = ", ".join(f"{row.metrics['grad/norm']:.4g}" for row in read_metrics(run))
    err = capsys.readouterr().err
    assert "lockstep: step 3: clipping: grad/norm was above 0.4 (400 times optimizer.max_grad_norm = 0.001)" in err
    assert f"({norms} at steps 1 to 3; grad/clipped 1" in err
    assert "to fix: lower optimizer.lr" in err
    assert f"lockstep train --resume {run.path} health.clipping=off" in err
    assert health_events(run) == [(3, "clipping", "stop")]
    assert read_events(run)[-1].kind == "stopped"
    page = run.report_path.read_text()
    assert "grad/norm was above 0.4" in page
    log = run.log_path.read_text()
    assert "stopping after step 3 of 6, by the rule health.clipping" in log
    assert f"report: {run.report_path}" in log


def test_with_the_rule_off_the_resumed_run_is_the_one_that_was_never_stopped(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    unbroken = trained(tmp_path, tiny_model_dir, *CLIPPED, "health.clipping=off", "name=unbroken")
    with pytest.raises(HealthStop):
        trained(tmp_path, tiny_model_dir, *CLIPPED, "name=stopped")
    path = tmp_path / "runs" / "stopped"
    assert main(["train", "--resume", str(path), "health.clipping=off"]) == 0
    run = RunDirectory.open(path)
    assert weights(run, 6) == weights(unbroken, 6)
    assert numbers(run) == numbers(unbroken)
    assert health_events(run) == [(3, "clipping", "stop")]
    kept = load([str(run.recipe_path)]).health.clipping
    assert (kept.tier, kept.limit, kept.steps) == ("off", 400, 3)  # it stays off in the next resume, and can be read
    changed = [e.facts["health"]["clipping"]["tier"] for e in read_events(run) if e.kind in ("start", "resume")]
    assert changed == ["stop", "off"]
    assert run.report_path.is_file()
    assert events(run, "finished")


def test_with_the_rule_on_the_resumed_run_stops_at_its_next_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(HealthStop):
        trained(tmp_path, tiny_model_dir, *CLIPPED)
    with pytest.raises(HealthStop, match="at steps 2 to 4"):  # steps before the stop count
        resume_run(tmp_path / "runs" / "run")
    run = resume_run(tmp_path / "runs" / "run", ["health.clipping=warn"])
    assert [row.step for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert health_events(run) == [
        (3, "clipping", "stop"),
        (4, "clipping", "stop"),
    ]  # it was said already: not once more


def test_a_resume_counts_the_evaluation_that_it_begins_with_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A rule of one's own, without advice: it breaks at the next evaluation, and is switched off as the message says."""
    rule = (
        "health.rules={long: {metric: eval/greedy/mean_tokens, when: {above: 1, tier: stop, steps: 3}, meaning: test}}"
    )
    with pytest.raises(HealthStop, match="at steps 0 to 2"):
        trained(tmp_path, tiny_model_dir, "steps=4", "eval.every=1", "eval.modes=greedy", rule)
    path = tmp_path / "runs" / "run"
    with pytest.raises(HealthStop, match="at steps 1 to 3") as caught:
        resume_run(path)
    off = "health.rules.long.when.tier=off"
    assert caught.value.fix.startswith("A checkpoint was saved; to continue with the health rule long switched off: ")
    assert caught.value.fix.endswith(f"--resume {path} {off}")
    run = resume_run(path, [off])
    assert [row.step for row in read_metrics(run)] == [0, 1, 2, 3, 4]


def test_nothing_but_health_may_change_in_a_resume(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=1")
    before = run.recipe_path.read_text()
    assert main(["train", "--resume", str(run.path), "health.clipping=off", "optimizer.lr=1"]) == 2
    assert (
        "optimizer.lr=1: a resumed run keeps its own recipe; only settings of health, track and placement, "
        "and optimizer.offload, may change" in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match=r"did you mean health\.clipping\?"):
        resume_run(run.path, ["health.clippin=off"])
    assert run.recipe_path.read_text() == before
    assert len(run.manifest()["attempts"]) == 1


def test_a_rule_that_warns_says_it_once_and_lets_the_run_end(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, *CLIPPED, "health.clipping=warn")
    assert [row.step for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert health_events(run) == [(3, "clipping", "warn")]
    log = run.log_path.read_text()
    assert log.count("warning: clipping: grad/norm was above 0.4") == 1
    assert "to do: lower optimizer.lr" in log


def test_after_the_last_step_there_is_nothing_to_stop(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, *CLIPPED, "steps=3")
    assert health_events(run) == [(3, "clipping", "stop")]
    assert events(run, "finished")
    assert "warning: clipping: " in run.log_path.read_text()


def test_a_grader_that_rewards_garbage_stops_the_run_before_its_first_update(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    always = f"task.verifier.path={tmp_path}/grader.py:always_right"
    assert main(["train", *words(tmp_path, tiny_model_dir, NO_EVAL, "steps=3", always)]) == 3
    err = capsys.readouterr().err
    assert "step 1: the grader rewards garbage like a right reply: sums/" in err
    assert ": 'qwerty uiop', " in err
    assert "health.garbage=warn" in err
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=1", always, "health.garbage=warn", "name=warned")
    assert any("rewards garbage" in text for text in events(run, "warning"))


def test_a_grader_behind_tools_is_tried_with_garbage_too(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = recipe(tmp_path, tiny_model_dir, f"task.verifier.path={tmp_path}/grader.py:always_right")
    questions = made.task.model_dump(mode="json")
    tools = ToolTask.model_validate({"tools": [{"path": "calculator"}], "questions": questions})
    task = build_task(tools, 1)
    with pytest.raises(HealthStop, match="rewards garbage like a right reply"):
        check_garbage(task, task.batch(0, 4), 1, "stop")


def test_texts_among_a_graders_metrics_are_stored_and_stop_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    wordy = f"task.verifier.path={tmp_path}/grader.py:wordy"
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=1", wordy)
    rows = read_rollouts(run, 1)
    assert [row.facts for row in rows] == [{"why": "a text", "parts": "{'a': [1]}"}] * 8
    assert {row.metrics["bytes"] for row in rows} == {float(len(row.text)) for row in rows}
    (record,) = read_metrics(run)
    assert record.metrics["answer/bytes"] == pytest.approx(sum(len(row.text) for row in rows) / 8)
    lengths = sorted(len(row.text) for row in rows)
    assert [record.metrics[f"answer/bytes/{name}"] for name in ("min", "max")] == [lengths[0], lengths[-1]]
    assert lengths[-2] <= record.metrics["answer/bytes/p90"] <= lengths[-1]
    assert record.metrics["reward/unscored"] == 0


def test_replies_that_all_earn_the_same_stop_a_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    found = words(tmp_path, tiny_model_dir, NO_EVAL, "steps=30")
    always = f"task.verifier.path={tmp_path}/grader.py:always_right"
    assert main(["train", *found, always, "health.garbage=off"]) == 3
    run = RunDirectory.open(tmp_path / "runs" / "run")
    assert [row.step for row in read_metrics(run)] == list(range(1, 7))
    assert health_events(run)[-1] == (6, "flat_start", "stop")
    table = next(event for event in read_events(run) if event.kind == "smoke").facts["rows"]
    assert ["reward", "reward/mean", "1", "1", "0.02 to 0.98 at steps 1 to 6", "warn"] in table
    assert ["advantage spread", "advantage/std", "0", "0", "≥ 0.05", "ok"] in table  # its range is for unsolved tasks
    assert "smoke gate: the first 6 steps" in run.log_path.read_text()


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.overlong={buffer: 24, penalty: 0.5}", "rollout={max_tokens: 24, stop: [e, a, t]}"),
        ("algorithm.kind=reinforce",),
    ],
)
def test_equal_rewards_are_no_reason_to_stop_where_there_is_a_gradient(
    tmp_path: Path, tiny_model_dir: Path, settings: tuple[str, ...]
) -> None:
    """The length decides, or the reward itself is the advantage."""
    rule = "health.reward_flat={tier: stop, limit: 1.0e-9, steps: 2}"
    always = f"task.verifier.path={tmp_path}/grader.py:always_right"
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=4", always, rule, "health.garbage=off", *settings)
    rows = [row.metrics for row in read_metrics(run)]
    assert [row["reward/std"] for row in rows] == [0.0] * 4
    assert sum(row["advantage/nonzero"] > 0 for row in rows) >= 3
    assert health_events(run) == []


def test_what_the_tokens_were_sampled_with_is_an_entropy_of_all_replies(tmp_path: Path, tiny_model_dir: Path) -> None:
    always = f"task.verifier.path={tmp_path}/grader.py:always_right"
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", always, "health.garbage=off")
    for row in read_metrics(run):
        sampled = [value for reply in read_rollouts(run, row.step) for value in reply.logprobs]
        assert row.metrics["entropy/sampled"] == pytest.approx(-sum(sampled) / len(sampled))
        assert "entropy/mean" not in row.metrics  # no reply has an advantage


def test_a_grader_that_leaves_amid_sampling_costs_no_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = (NO_EVAL, "steps=4", "save.every=9", f"task.verifier.path={tmp_path}/grader.py:down")
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    path = stopped(tmp_path, tiny_model_dir, *settings, step=1)
    (path / "checkpoints" / ".tmp-step_000002").mkdir()  # of a save that was killed: it holds nothing
    (tmp_path / "down").write_text(str(path))
    with pytest.raises(HealthStop):
        resume_run(path)
    assert [info.step for info in list_checkpoints(path) if info.complete] == [1, 2]
    (tmp_path / "down").unlink()
    run = resume_run(path)
    assert weights(run, 4) == weights(unbroken, 4)


def test_a_best_that_was_never_measured_is_said_at_the_end(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", "save.keep_best=answer/steps")
    assert "save.keep_best: no step of this run has answer/steps, so none was kept as the best" in events(
        run, "warning"
    )


def test_a_learning_rate_that_ruins_the_policy_stops_the_run_at_its_second_step(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words(tmp_path, tiny_model_dir, NO_EVAL, "steps=6", "optimizer.lr=1")]) == 3
    run = RunDirectory.open(tmp_path / "runs" / "run")
    moved = [row.metrics["sync/probe_shift"] for row in read_metrics(run)]
    assert len(moved) == 2
    assert min(moved) > 1
    assert health_events(run)[-1] == (2, "leap", "stop")
    assert "to fix: lower optimizer.lr ten-fold or more" in capsys.readouterr().err


def test_a_learning_rate_beyond_numbers_is_not_blamed_on_the_engine(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(SyncError, match="both compute NaN: the last update broke the weights") as caught:
        trained(tmp_path, tiny_model_dir, NO_EVAL, "optimizer.lr=1e300", "allow=[extreme]")
    assert "lower optimizer.lr" in caught.value.fix


def test_an_sft_run_that_stops_between_its_checkpoints_saves_proven_weights(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    args = ("eval.enabled=false", "steps=8", "save.every=8", "sft.validation_rows=0", "optimizer.max_grad_norm=0.0001")
    rule = "health.clipping={limit: 100, steps: 3, within: 3}"
    with pytest.raises(HealthStop, match="step 3: clipping"):
        sft_runs.trained(tmp_path, tiny_model_dir, *args, rule, "name=stopped")
    path = tmp_path / "runs" / "stopped"
    (row,) = [row for row in read_metrics(RunDirectory.open(path)) if row.step == 3]
    assert row.proof is not None
    assert row.proof["version"] == 3
    run = resume_run(path, ["health.clipping=off"])  # whose weights must have the fingerprint that was saved
    unbroken = sft_runs.trained(tmp_path, tiny_model_dir, *args, "health.clipping=off", "name=unbroken")
    assert weights(run, 8) == weights(unbroken, 8)


def test_the_free_disk_is_measured_at_each_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(HealthStop, match="step 2: disk: memory/disk_free_gib was below"):
        trained(tmp_path, tiny_model_dir, NO_EVAL, "health.disk.limit=1e12")
    run = RunDirectory.open(tmp_path / "runs" / "run")
    assert all(row.metrics["memory/disk_free_gib"] > 0 for row in read_metrics(run))
