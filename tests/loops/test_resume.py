"""A run that was stopped, killed, damaged or edited: it goes on bit for bit, or says why not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.load import dump
from lockstep.config.schema import Recipe
from lockstep.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DataError,
    EvaluationError,
    Interrupted,
    RunDirectoryError,
    WorkerLost,
)
from lockstep.evaluation.records import read_score, score_path
from lockstep.loops import start
from lockstep.loops.start import resume_run
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from tests.gallery import Gallery
from tests.loops.runs import (
    LORA,
    NO_EVAL,
    events,
    numbers,
    recipe,
    same,
    terminate_in,
    trained,
    weights,
    words,
    write_held,
)

ROOT = Path(__file__).parents[2]
LONG = ("steps=5", "update.samples_per_update=4", "optimizer.schedule=cosine", "optimizer.warmup_steps=2")


def stopped(folder: Path, model: Path, *overrides: str, step: int, name: str = "stopped") -> Path:
    """A run that got SIGTERM while it graded a sample of `step`."""
    settings = (*overrides, f"name={name}")
    recipe(folder, model, *settings)
    terminate_in(folder, folder / "runs" / name, step)
    with pytest.raises(Interrupted, match=f"SIGTERM after step {step} of") as caught:
        trained(folder, model, *settings)
    assert caught.value.exit_code == 75
    assert f"--resume {folder}/runs/{name}" in caught.value.fix
    return folder / "runs" / name


@pytest.mark.sampled("lora-bf16")
@pytest.mark.parametrize("adapter", [(), (*LORA, "model.dtype=bf16")], ids=["full-fp32", "lora-bf16"])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, tiny_model_dir: Path, adapter: tuple[str, ...]
) -> None:
    settings = (*adapter, *LONG, "eval.every=2", "save.every=3")
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    path = stopped(tmp_path, tiny_model_dir, *settings, step=2)
    assert [info.step for info in list_checkpoints(path)] == [2]  # saved although 3 steps were between saves
    run = resume_run(path)
    assert events(run, "resume") == ["at step 2"]
    assert same(run, unbroken, 5)
    for step in (0, 2, 4, 5):  # that of step 2 was put off to the resume
        for mode in ("greedy", "sampled"):
            again, once = (read_score(score_path(r.path, step, mode)) for r in (run, unbroken))
            assert again.results == once.results
            assert again.conditions == once.conditions


def test_a_stop_in_the_last_step_leaves_the_evaluation_to_the_resume(tmp_path: Path, tiny_model_dir: Path) -> None:
    unbroken = trained(tmp_path, tiny_model_dir, "name=unbroken")
    path = stopped(tmp_path, tiny_model_dir, step=3)
    assert not score_path(path, 3, "greedy").exists()
    run = resume_run(path)
    assert run.report_path.is_file()
    assert (
        read_score(score_path(path, 3, "greedy")).results == read_score(score_path(unbroken.path, 3, "greedy")).results
    )
    assert numbers(run) == numbers(unbroken)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(
    tmp_path: Path, tiny_model_dir: Path, gallery: Gallery
) -> None:
    settings = recipe(tmp_path, tiny_model_dir, NO_EVAL, "name=early")
    RunDirectory.create(tmp_path / "runs" / "early", dump(settings), {}).close()
    run = resume_run(tmp_path / "runs" / "early")
    assert same(run, gallery.run("plain"), 3)


def test_a_finished_run_resumes_to_itself(tmp_path: Path, gallery: Gallery) -> None:
    run = gallery.copy("plain", tmp_path / "run")
    before = weights(run, 3), numbers(run)
    again = resume_run(run.path)
    assert (weights(again, 3), numbers(again)) == before


@pytest.mark.parametrize("checkpoints", [True, False])
def test_an_edited_recipe_is_refused_before_the_first_checkpoint_too(
    tmp_path: Path, tiny_model_dir: Path, checkpoints: bool
) -> None:
    path = stopped(tmp_path, tiny_model_dir, NO_EVAL, step=1)
    if not checkpoints:
        shutil.rmtree(path / "checkpoints")
        (path / "events.jsonl").unlink()
    text = (path / "recipe.yaml").read_text()
    before = (path / "manifest.json").read_bytes()
    for old, new in (
        (r"\n  lr: .*\n", "\n  lr: 0.5\n"),
        ("\nseed: 5\n", "\nseed: 6\n"),
        ("\nsteps: 3\n", "\nsteps: 4\n"),
    ):
        edited = re.sub(old, new, text)
        assert edited != text
        (path / "recipe.yaml").write_text(edited)
        with pytest.raises(RunDirectoryError, match=r"recipe\.yaml: the recipe was edited after the run began"):
            resume_run(path)
        assert (path / "manifest.json").read_bytes() == before, "the refused resume counts as no attempt"
    (path / "recipe.yaml").write_text(text)
    assert resume_run(path, ["health.clipping=off"]).path == path


CHANGES = {
    "shortened": lambda lines: lines[:-3],
    "gone": lambda lines: [],
    "a row less": lambda lines: [line for line in lines if '"step": 1,' not in line],
    "another number": lambda lines: [re.sub(r'"reward/mean": [0-9.]+', '"reward/mean": 0.125', one) for one in lines],
}


def test_rows_that_are_not_those_that_were_written_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = stopped(tmp_path, tiny_model_dir, NO_EVAL, "save.keep_best=reward/mean", "save.keep_last=1", step=2)
    file = path / "metrics.jsonl"
    content, kept = file.read_text(), sorted((path / "checkpoints").iterdir())
    for name, change in CHANGES.items():
        changed = "".join(change(content.splitlines(keepends=True)))
        assert changed != content
        file.write_text(changed)
        with pytest.raises(
            RunDirectoryError, match=r"metrics\.jsonl: the file does not hold the rows .* up to step 2"
        ) as caught:
            resume_run(path)
        assert f"warm_start={path}/checkpoints/step_000002" in caught.value.fix, name
        assert sorted((path / "checkpoints").iterdir()) == kept, name
    file.write_text(content)
    assert resume_run(path).path == path


def test_the_best_checkpoint_is_known_from_the_state(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Rows that came after a checkpoint are not of the weights that a resume goes on with, and cannot be the best."""
    keep = (NO_EVAL, "save.keep_best=reward/mean", "save.keep_last=1", "steps=4")
    unbroken = trained(tmp_path, tiny_model_dir, *keep, "name=unbroken")
    path = stopped(tmp_path, tiny_model_dir, *keep, step=2)
    with RunDirectory.open(path).metrics_path.open("a") as file:  # a killed attempt had come further
        row = {"step": 3, "attempt": 1, "time": "2026-01-01T00:00:00Z", "metrics": {"reward/mean": 9.0}, "proof": None}
        file.write(json.dumps(row) + "\n")
    run = resume_run(path)
    assert same(run, unbroken, 4)
    there = [[info.step for info in list_checkpoints(one.path)] for one in (run, unbroken)]
    assert there[0] == there[1]


FILLS_THE_DISK = '''

import shutil


def fills(prompt, reply):
    """Fill the disk of the run once its first step is logged."""
    runs = Path(__file__).parent / "runs"
    small = shutil.disk_usage(runs).total < 1 << 30  # ours, and never the machine's
    if small and "  step 1/" in log_of(runs / "run") and not (runs / "filler").exists():
        with open(runs / "filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 20)):
                    pass
            except OSError:
                pass
    return grade(prompt, reply)
'''


def test_a_disk_that_fills_up_in_a_run_is_told_and_the_run_goes_on_later(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A 300 MiB file system of our own, in a user namespace where that is allowed."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    settings = (NO_EVAL, f"task.verifier.path={tmp_path}/grader.py:fills")
    arguments = words(tmp_path, tiny_model_dir, *settings)
    with (tmp_path / "grader.py").open("a") as file:
        file.write(FILLS_THE_DISK)
    (tmp_path / "runs").mkdir()
    script = """
        mount -t tmpfs -o size=300m tmpfs "$0/runs" || exit 99
        "$@"; code=$?
        rm "$0/runs/filler" && cp -r "$0/runs/run" "$0/copy"; exit $code
    """
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        script,
        str(tmp_path),
        sys.executable,
        "-m",
        "lockstep",
        "train",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 6, done.stderr
    assert re.search(
        r"lockstep: \S+/runs/run/\S+: cannot be written: No space left on device; [0-9.]+ MiB are", done.stderr
    )
    assert "Traceback" not in done.stderr
    (tmp_path / "copy").rename(tmp_path / "runs" / "run")
    run = resume_run(tmp_path / "runs" / "run")
    assert same(run, trained(tmp_path, tiny_model_dir, NO_EVAL, "name=unbroken"), 3)


def test_another_base_model_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Same recipe, same adapter, but the folder that model.path names holds other weights now."""
    from tests.tiny import write_tiny_model

    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    path = stopped(tmp_path, model, *LORA, NO_EVAL, step=2)
    write_tiny_model(model, seed=1)
    with pytest.raises(CheckpointError, match="restored weights are not the saved ones"):
        resume_run(path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def test_a_resume_may_keep_the_optimizers_state_elsewhere(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Without offload, with it, and without again: the run is the one that never changed."""
    settings = (NO_EVAL, "model.dtype=bf16")
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken", "steps=3", "seed=2")
    run = trained(tmp_path, tiny_model_dir, *settings, "steps=1", "seed=2")
    for steps, place in ((2, "cpu"), (3, "none")):
        run = resume_run(run.path, [f"optimizer.offload={place}"], steps=steps)
        assert ("main memory" in run.log_path.read_text()) == (steps >= 2)
    assert weights(run, 3) == weights(unbroken, 3)
    assert run.log_path.read_text().count("masters and moments in main memory") == 1


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> RunDirectory:
    """Four steps in one go."""
    return trained(tmp_path_factory.mktemp("unbroken"), tiny_model_dir, NO_EVAL, "name=unbroken", "steps=4")


def test_a_damaged_checkpoint_is_named_and_passed_over_only_when_asked(
    tmp_path: Path, tiny_model_dir: Path, unbroken: RunDirectory
) -> None:
    path = stopped(tmp_path, tiny_model_dir, NO_EVAL, "steps=4", step=3)
    flip(path / "checkpoints" / "step_000003" / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"step_000003: model\.safetensors: its SHA-256") as caught:
        resume_run(path)
    assert "step 2, which is intact, with --allow-fallback" in caught.value.fix
    run = resume_run(path, allow_fallback=True)
    assert any("step 3 is damaged" in message for message in events(run, "warning"))
    assert events(run, "resume")[-1] == "at step 2"
    assert same(run, unbroken, 4)


def test_a_damaged_newest_checkpoint_does_not_count_among_those_that_are_kept(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Its step would be the newest until it is made again, and each new checkpoint would be deleted for it."""
    path = stopped(tmp_path, tiny_model_dir, NO_EVAL, "steps=6", "save.keep_last=2", step=5)
    flip(path / "checkpoints" / "step_000005" / "model.safetensors")
    run = resume_run(path, allow_fallback=True)
    there = sorted(folder.name for folder in (path / "checkpoints").iterdir())
    assert there == ["damaged_step_000005", "step_000005", "step_000006"]
    assert any("set aside as damaged_step_000005" in message for message in events(run, "warning"))


def test_checkpoints_that_were_removed_are_no_reason_to_begin_anew(
    tmp_path: Path, tiny_model_dir: Path, unbroken: RunDirectory
) -> None:
    path = stopped(tmp_path, tiny_model_dir, NO_EVAL, "steps=4", step=3)
    shutil.rmtree(path / "checkpoints" / "step_000003")
    with pytest.raises(
        CheckpointError, match="the checkpoint of step 3, the last that was saved, is missing"
    ) as caught:
        resume_run(path)
    assert "from step 2 with --allow-fallback" in caught.value.fix
    run = resume_run(path, allow_fallback=True)
    assert events(run, "resume")[-1] == "at step 2"
    assert same(run, unbroken, 4)
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(CheckpointError, match="the checkpoint of step 4") as caught:
        resume_run(path)
    assert "from the beginning with --allow-fallback" in caught.value.fix


def test_a_run_does_not_go_on_over_other_data(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = stopped(tmp_path, tiny_model_dir, "eval.every=9", step=2)
    data = tmp_path / "sums.jsonl"
    before = data.read_text()
    data.write_text(before.replace("State the final answer", "Say"))
    with pytest.raises(DataError, match="the training prompts changed since the run started"):
        resume_run(path)
    data.write_text(before)
    assert resume_run(path).path == path


def test_an_only_checkpoint_that_is_damaged_does_not_start_the_run_over(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = stopped(tmp_path, tiny_model_dir, NO_EVAL, step=1)
    file = path / "checkpoints" / "step_000001" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for fallback in (False, True):
        with pytest.raises(CorruptCheckpointError, match=r"optimizer\.safetensors"):
            resume_run(path, allow_fallback=fallback)


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """The program that anyone can run, with few kills; its own table says what was compared."""
    command = [sys.executable, str(ROOT / "benchmarks" / "resume_kill9.py"), "--kills", "3", "--start", "warm"]
    result = subprocess.run(
        [*command, "--work", str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "3 of 3 killed runs ended bit-equal to the unbroken one"
    assert not list(tmp_path.iterdir())


def test_a_signal_in_the_first_evaluation_ends_the_run_there(tmp_path: Path, tiny_model_dir: Path) -> None:
    recipe(tmp_path, tiny_model_dir)
    terminate_in(tmp_path, tmp_path / "runs" / "run", 1)  # the first grading after the proof is that of step 0
    with pytest.raises(Interrupted, match="SIGTERM during an evaluation") as caught:
        trained(tmp_path, tiny_model_dir)
    path = tmp_path / "runs" / "run"
    assert f"--resume {path}" in caught.value.fix
    run = resume_run(path)
    assert [row.step for row in read_metrics(run)] == [0, 1, 2, 3]


def test_a_signal_in_a_later_evaluation_keeps_its_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = ("steps=3", "eval.every=2", "save.every=9", f"task.verifier.path={tmp_path}/grader.py:in_evaluation")
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    write_held(tmp_path, recipe(tmp_path, tiny_model_dir, *settings))
    terminate_in(tmp_path, tmp_path / "runs" / "run", 2)
    with pytest.raises(Interrupted, match="SIGTERM after step 2 of 3; a checkpoint was saved"):
        trained(tmp_path, tiny_model_dir, *settings)
    path = tmp_path / "runs" / "run"
    assert not score_path(path, 2, "sampled").exists()  # the mode that came after the signal
    run = resume_run(path)
    assert same(run, unbroken, 3)
    assert (
        read_score(score_path(path, 2, "sampled")).results
        == read_score(score_path(unbroken.path, 2, "sampled")).results
    )


def test_a_grader_that_fails_in_an_evaluation_costs_no_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = (
        "steps=3",
        "eval.every=2",
        "save.every=9",
        f"task.verifier.path={tmp_path}/grader.py:down_in_evaluation",
    )
    write_held(tmp_path, recipe(tmp_path, tiny_model_dir, *settings))
    (tmp_path / "down").write_text(str(tmp_path / "runs" / "run"))
    with pytest.raises(EvaluationError, match="none of the 8 replies could be scored"):
        trained(tmp_path, tiny_model_dir, *settings)
    path = tmp_path / "runs" / "run"
    assert [info.step for info in list_checkpoints(path)] == [2]
    assert [row.step for row in read_metrics(RunDirectory.open(path))] == [0, 1, 2]
    (tmp_path / "down").unlink()
    run = resume_run(path)
    assert any(name.startswith("eval/") for row in read_metrics(run) if row.step == 2 for name in row.metrics)


def test_what_was_once_allowed_to_be_passed_over_is_no_reason_to_end_a_later_resume(
    tmp_path: Path, tiny_model_dir: Path, unbroken: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is lost before the run has saved again: the run goes on by itself, and so does a plain resume."""
    path = stopped(tmp_path, tiny_model_dir, NO_EVAL, "steps=4", step=3)
    flip(path / "checkpoints" / "step_000003" / "model.safetensors")
    losses, real = iter([True, True, False]), start.train

    def train(*arguments: Any) -> None:
        if next(losses):
            raise WorkerLost("rank 1 died", where="rank 1", fix="-")
        real(*arguments)

    monkeypatch.setattr(start, "train", train)
    monkeypatch.setattr(Recipe, "restarts", property(lambda recipe: 1))
    with pytest.raises(WorkerLost):
        resume_run(path, allow_fallback=True)
    run = resume_run(path)
    assert events(run, "fallback") == ["to step 2: the checkpoint of step 3 is given up"]
    assert same(run, unbroken, 4)
