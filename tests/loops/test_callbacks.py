from __future__ import annotations

import gc
from pathlib import Path

import pytest

from lockstep.checkpoint.store import list_checkpoints
from lockstep.errors import Interrupted, LearnerError
from lockstep.loops.start import resume_run
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events, read_metrics
from tests.loops.runs import NO_EVAL, recipe, terminate_in, trained

CODE = """
def enough(history, limit):
    return f"{len(history)} steps are enough" if len(history) >= limit else None


def breaks(history):
    if history[-1][0] == 2:
        raise RuntimeError("my own mistake")


def meddles(history):
    history[-1][1]["lr"] = 0.0


def notes(history):
    with open(__file__ + ".seen", "a") as file:
        print([(step, "reward/mean" in metrics, "eval/greedy/accuracy" in metrics) for step, metrics in history], file=file)


def collects(history):
    import gc

    return f"{gc.get_freeze_count()} objects are left alone"
"""


def own(tmp_path: Path, name: str, settings: str = "{}") -> str:
    (tmp_path / "stop.py").write_text(CODE)
    return f"health.callbacks=[{{path: '{tmp_path}/stop.py:{name}', settings: {settings}}}]"


def test_a_stopping_rule_of_ones_own_ends_the_run_and_counts_the_steps_before_a_resume(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=8", own(tmp_path, "enough", "{limit: 2}"))
    assert [row.step for row in read_metrics(run)] == [1, 2]
    assert [info.step for info in list_checkpoints(run.path)][-1] == 2
    (event,) = [one for one in read_events(run) if one.kind == "early_stop"]
    assert event.message.endswith("stop.py:enough: 2 steps are enough")
    ends = [one.step for one in read_events(run) if one.kind in ("verified", "finished")]
    assert ends == [2, 2], "of the steps that were made, not of those that were asked for"
    (copy,) = (run.path / "code").glob("*_stop.py")
    assert copy.read_text() == CODE
    resume_run(run.path, [own(tmp_path, "enough", "{limit: 4}")])
    assert [row.step for row in read_metrics(RunDirectory.open(run.path))] == [1, 2, 3, 4]


def test_a_resume_shows_the_step_that_it_begins_with_once_and_whole(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Its evaluation was put off, and is shown with the step's other numbers; a resume that measures nothing calls none."""
    settings = ("steps=3", "eval.every=2", "eval.modes=greedy", own(tmp_path, "notes"))
    recipe(tmp_path, tiny_model_dir, *settings)
    terminate_in(tmp_path, tmp_path / "runs" / "run", 2)
    with pytest.raises(Interrupted):
        trained(tmp_path, tiny_model_dir, *settings)
    resume_run(tmp_path / "runs" / "run")
    resume_run(tmp_path / "runs" / "run")
    first, second, evaluated, third = (1, True, False), (2, True, False), (2, True, True), (3, True, True)
    seen = [[first], [first, second], [first, evaluated], [first, evaluated, third]]
    assert (tmp_path / "stop.py.seen").read_text().splitlines() == [str(one) for one in seen]


def test_a_callback_that_fails_ends_the_run_with_its_line_and_a_checkpoint(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    with pytest.raises(LearnerError, match=r"callback fails: RuntimeError: my own mistake .*stop\.py:8"):
        trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=4", "save.every=4", own(tmp_path, "breaks"))
    assert [info.step for info in list_checkpoints(tmp_path / "runs" / "run")] == [2]


def test_one_cannot_change_the_numbers(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(LearnerError, match="does not support item assignment"):
        trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", own(tmp_path, "meddles"))


def test_one_that_cannot_be_called_costs_no_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(LearnerError, match=r"would be called with \(history\)"):
        trained(tmp_path, tiny_model_dir, NO_EVAL, own(tmp_path, "enough"))
    assert not (tmp_path / "runs" / "run").exists()


def test_collections_leave_alone_what_lived_before_the_steps_and_only_until_the_end(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", own(tmp_path, "collects"))
    (event,) = [one for one in read_events(run) if one.kind == "early_stop"]
    assert int(event.message.split()[-5]) > 10_000
    assert gc.get_freeze_count() == 0
