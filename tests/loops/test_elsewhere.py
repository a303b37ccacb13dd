"""A run whose checkpoints are on another file system: everything goes on as if they lay in its folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.build.warm_start import find_parent
from lockstep.checkpoint.store import list_checkpoints
from lockstep.cli import main
from lockstep.config.load import load
from lockstep.errors import CheckpointError, DoesNotFitError
from lockstep.export.export import choice_note
from lockstep.hosts.inputs import inputs_of
from lockstep.loops.start import resume_run
from lockstep.plan.disk import SPARE, DiskPlan, Share, require_room, shares
from lockstep.plan.preview import preview_lines
from lockstep.scoring.targets import find_target
from lockstep.track.places import run_of
from lockstep.track.rundir import RunDirectory
from tests.gallery import Gallery
from tests.loops.runs import LORA, NO_EVAL, recipe, terminate_in, weights, words
from tests.saying import shell


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that is not that of the runs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert Path(folder).stat().st_dev != tmp_path.stat().st_dev
        yield Path(folder)


def killed(folder: Path, model: Path, *overrides: str) -> Path:
    """A run whose process got SIGKILL while it graded a sample of its second step."""
    arguments = words(folder, model, *overrides)
    grader = folder / "grader.py"
    grader.write_text(grader.read_text().replace("signal.SIGTERM", "signal.SIGKILL"))
    run = folder / "runs" / "run"
    terminate_in(folder, run, 2)
    done = shell("train", *arguments)
    assert done.returncode == -9, done.stderr
    return run


def test_a_run_is_killed_resumed_scored_exported_and_cleaned(
    tmp_path: Path, tiny_model_dir: Path, disk: Path, gallery: Gallery, capsys: pytest.CaptureFixture[str]
) -> None:
    path = killed(tmp_path, tiny_model_dir, NO_EVAL, f"paths.checkpoints={disk}")
    (folder,) = disk.iterdir()
    assert [info.path for info in list_checkpoints(path)] == [folder / "step_000001"]
    assert main(["train", "--resume", str(path)]) == 0
    assert "resumed from step 1: every file verified" in capsys.readouterr().out
    run = RunDirectory.open(path)
    assert weights(run, 3) == weights(gallery.run("plain"), 3)  # a run with checkpoints in its folder, never stopped
    assert sorted(place.name for place in folder.iterdir()) == ["run.json", "step_000002", "step_000003"]
    assert not (path / "checkpoints").exists()
    assert run.report_path.is_file()

    saved = folder / "step_000002"
    assert main(["eval", str(saved), "eval.items=2", "eval.enabled=true"]) == 0
    assert f"{path} at step 2" in capsys.readouterr().out
    assert [*(path / "scores").rglob("step_000002_greedy*.json")]
    assert find_target(str(path)).step == 3
    assert main(["export", str(path), str(tmp_path / "out"), "--step", "2"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "checkpoints of steps 2, 3" in choice_note(str(path), None)
    assert main(["runs", "--dir", str(path.parent), "archive", "run"]) == 0
    assert main(["runs", "--dir", str(path.parent), "gc", "--yes"]) == 0
    assert [info.step for info in list_checkpoints(path)] == [3]

    folder.rename(disk / "elsewhere")
    for again in (lambda: resume_run(path), lambda: find_target(str(path))):
        with pytest.raises(CheckpointError, match="moved or removed, or its disk is not mounted"):
            again()
    assert main(["runs", "--dir", str(path.parent), "gc"]) == 0  # it has nothing to remove


def test_what_begins_from_a_checkpoint_finds_its_run(
    tmp_path: Path, tiny_model_dir: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm starts, and what is sent to another machine: the run with its checkpoint, nothing else of that disk."""
    (disk / "other").write_bytes(bytes(1000))
    keep = (*LORA, NO_EVAL, "steps=1", f"paths.checkpoints={disk}", f"paths.cache={disk}")
    path = tmp_path / "runs" / "run"
    assert main(["train", *words(tmp_path, tiny_model_dir, *keep)]) == 0
    (info,) = list_checkpoints(path)
    assert run_of(info.path) == path
    parent = find_parent(recipe(tmp_path, tiny_model_dir, *LORA, NO_EVAL, f"warm_start={info.path}"))
    assert parent is not None
    assert parent.run == path
    for argv in (["eval", str(info.path)], ["eval", str(path)]):
        sent = inputs_of(argv)
        (there,) = [name for name in sent.files if name.endswith("step_000001/COMMIT.json")]
        assert "/checkpoints/step_000001/" in there
        assert str(disk) not in "".join(sent.texts.values())
        assert disk / "other" not in sent.files.values()
    monkeypatch.setenv("HF_HOME", "")
    assert find_target(str(path)).run == path
    assert os.environ["HF_HOME"].startswith(str(disk))  # a model is looked for where the run has it
    assert inputs_of(["eval", "m", "--against", f"{path}@1"]).files.keys() >= {
        f"{there[: there.index('/check')]}/recipe.yaml"
    }
    sent = inputs_of(["train", str(tmp_path / "recipe.yaml"), f"paths.checkpoints={disk}"])
    assert sent.argv[-1] == "paths.checkpoints=null"
    assert not [file for file in sent.files.values() if file.is_relative_to(disk)]


def test_each_disk_is_asked_for_its_part(tmp_path: Path, tiny_model_dir: Path, disk: Path) -> None:
    plan = DiskPlan(weights=8e9, optimizer=24e9, files=0, kept=2, rollouts=1e9, scores=1e8)
    runs, saved = shares(plan, tmp_path / "runs", disk)
    assert (runs.folders, saved.folders) == ((tmp_path / "runs",), (disk,))
    assert (runs.needs, saved.needs) == pytest.approx((1.1e9, 64e9))
    (both,) = shares(plan, tmp_path / "runs", tmp_path / "runs" / "run" / "checkpoints")
    assert both.needs == plan.total
    require_room(plan, [Share((tmp_path,), 1.1e9, 1.1e9 + SPARE), Share((disk,), 64e9, 64e9 + SPARE)])
    with pytest.raises(DoesNotFitError, match=r"needs 64\.27 GB of disk space, but only 50\.00 GB are free") as caught:
        require_room(plan, [Share((tmp_path,), 1.1e9, 1e12), Share((disk,), 64e9, 50e9)])
    assert caught.value.where == str(disk)
    asked = load(words(tmp_path, tiny_model_dir, f"paths.checkpoints={disk}"))
    (line,) = [line for line in preview_lines(asked) if line.startswith("disk: ")]
    assert f"free in {disk}" in line
    assert f"free in {tmp_path}/runs" in line
