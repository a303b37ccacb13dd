"""A run that is made longer is the run that was that long from the start, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import cli
from lockstep.checkpoint.store import list_checkpoints
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.loops.start import resume_run
from lockstep.run.checkpointer import Checkpointer
from lockstep.track.rundir import RunDirectory
from tests.loops.runs import LORA, fingerprints, numbers, same, trained, words
from tests.loops.test_resume import stopped
from tests.saying import Printed


def test_a_longer_run_is_equal_to_one_of_that_length(tmp_path: Path, tiny_model_dir: Path, printed: Printed):
    overrides = (*LORA, "eval.every=2", "eval.modes=greedy", "save.keep_last=9")
    whole = trained(tmp_path / "whole", tiny_model_dir, *overrides, "steps=5", f"task.data={tmp_path}/whole/sums.jsonl")
    given = words(tmp_path / "short", tiny_model_dir, *overrides, "steps=2", f"task.data={tmp_path}/whole/sums.jsonl")
    assert cli.main(["train", *given]) == 0
    run = tmp_path / "short" / "runs" / "run"
    assert cli.main(["train", "--resume", str(run), "--steps", "4"]) == 0
    resume_run(run, steps=5)  # again
    found = RunDirectory.open(run)
    assert found.manifest()["extended"] == [2, 4, 5]
    assert fingerprints(found) == fingerprints(whole)
    trained_steps = {step: values for step, values in numbers(whole).items() if step in (1, 3, 5)}
    again = {step: values for step, values in numbers(found).items() if step in (1, 3, 5)}
    disk = ("disk/", "memory/")
    for step, values in trained_steps.items():
        assert {k: v for k, v in values.items() if not k.startswith(disk)} == {
            k: v for k, v in again[step].items() if not k.startswith(disk)
        }
    assert "is finished: step 5" in printed("train", "--resume", run)


def test_a_run_whose_plan_depends_on_its_length_is_refused_in_words(tmp_path: Path, tiny_model_dir: Path):
    run = trained(tmp_path, tiny_model_dir, *LORA, "steps=2", "optimizer.schedule=cosine", "eval.enabled=false")
    with pytest.raises(ConfigError, match=r"optimizer\.schedule=cosine lowers the learning rate over 2 steps"):
        resume_run(run.path, steps=4)
    with pytest.raises(ConfigError, match="the run has 2 steps already"):
        resume_run(run.path, steps=2)
    with pytest.raises(ConfigError, match="--steps 1000001 is too high: must be at most 1000000"):
        resume_run(run.path, steps=10**6 + 1)
    assert RunDirectory.open(run.path).attempt == 1  # nothing was tried


def test_an_edited_number_of_steps_is_still_noticed(tmp_path: Path, tiny_model_dir: Path):
    run = trained(tmp_path, tiny_model_dir, *LORA, "steps=1", "eval.enabled=false")
    resume_run(run.path, steps=2)
    run.recipe_path.write_text(run.recipe_path.read_text().replace("steps: 2", "steps: 7"))
    with pytest.raises(RunDirectoryError, match="was edited after the run began"):
        resume_run(run.path)


def test_a_warm_up_that_is_a_share_of_the_length_is_refused(tmp_path: Path, tiny_model_dir: Path):
    run = trained(tmp_path, tiny_model_dir, *LORA, "steps=4", "optimizer.warmup_ratio=0.5", "eval.enabled=false")
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_ratio=0\.5 makes the warm-up a share of 4 steps"):
        resume_run(run.path, steps=8)


def test_a_run_that_is_killed_while_it_is_extended_can_be_resumed(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    run = trained(tmp_path, tiny_model_dir, *LORA, "steps=1", "eval.enabled=false")
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "replace_recipe", lambda self, text: 1 / 0)  # after the manifest was written
        with pytest.raises(ZeroDivisionError):
            resume_run(run.path, steps=3)
    resume_run(run.path)
    resume_run(run.path, steps=2)
    assert max(numbers(RunDirectory.open(run.path))) == 2


def test_a_step_that_is_evaluated_by_the_resume_becomes_the_best_of_its_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was saved before the score was known; after the last step no other is saved that would have it."""
    keep = ("steps=4", "eval.every=2", "save.every=4", "save.keep_best=eval/greedy/accuracy", "save.keep_last=1")
    unbroken = trained(tmp_path, tiny_model_dir, *keep, "name=unbroken")
    path = stopped(tmp_path, tiny_model_dir, *keep, step=4)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", lambda *arguments: 1 / 0)  # killed after the evaluation
        with pytest.raises(ZeroDivisionError):
            resume_run(path)
    run = resume_run(path)
    found, wanted = ([(one.step, one.meta["best"]) for one in list_checkpoints(it.path)] for it in (run, unbroken))
    assert found == wanted == [(4, [0.5, 4])]
    assert same(run, unbroken, 4)
    assert resume_run(run.path).path == run.path
