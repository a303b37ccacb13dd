"""Checkpoints on another disk: which folder is whose, and what is said when it is moved, copied, or gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.checkpoint.store import save
from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.track.listing import annotate, list_runs, removable, remove
from lockstep.track.places import RECORD, checkpoints_of, run_of
from lockstep.track.rundir import RunDirectory


def made(tmp_path: Path, name: str = "run", runs: str = "runs") -> tuple[Path, Path]:
    """A run that has three checkpoints on "another disk"; returns both folders."""
    (tmp_path / "disk").mkdir(exist_ok=True)
    run = tmp_path / runs / name
    RunDirectory.create(run, "name: run\n", {}, str(tmp_path / "disk")).close()
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "attempt": 1, "time": "2026-01-01T00:00:00Z", "metrics": {}, "proof": null}\n'
    )
    folder = checkpoints_of(run)
    for step in (1, 2, 3):
        save(run, step, lambda place: None, {})
    return run, folder


def test_runs_of_one_name_do_not_mix(tmp_path: Path) -> None:
    (one, first), (other, second) = made(tmp_path), made(tmp_path, runs="others")
    assert first.parent == second.parent == tmp_path / "disk"
    assert first != second
    assert first.name.startswith("run-")
    assert (run_of(first / "step_000001"), run_of(second / "step_000001")) == (one, other)
    assert not (one / "checkpoints").exists()
    (one / RECORD).write_text((other / RECORD).read_text().replace(second.name, first.name))
    with pytest.raises(CheckpointError, match=f"another run, not of {one}"):
        checkpoints_of(one)


def test_a_folder_that_was_moved_is_named_with_what_to_do(tmp_path: Path) -> None:
    run, folder = made(tmp_path)
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="moved or removed, or its disk is not mounted") as caught:
        RunDirectory.resume(run, {})
    assert caught.value.where == str(folder)
    assert f"write its new path into {run / RECORD}" in caught.value.fix
    assert len(RunDirectory.open(run).manifest()["attempts"]) == 1  # it cost no attempt
    record = json.loads((run / RECORD).read_text())
    (run / RECORD).write_text(json.dumps(record | {"folder": str(moved)}))
    RunDirectory.resume(run, {}).close()
    assert run_of(moved / "step_000001") == run
    assert json.loads((moved / "run.json").read_text())["folder"] == str(moved)


def test_a_run_that_was_moved_keeps_its_checkpoints(tmp_path: Path) -> None:
    run, folder = made(tmp_path)
    moved = run.rename(tmp_path / "archive")
    assert checkpoints_of(moved) == folder
    assert run_of(folder / "step_000001") is None  # until it is resumed
    RunDirectory.resume(moved, {}).close()
    assert run_of(folder / "step_000001") == moved


def test_a_copy_of_a_run_neither_writes_nor_deletes_its_checkpoints(tmp_path: Path) -> None:
    run, folder = made(tmp_path)
    copy = Path(shutil.copytree(run, tmp_path / "runs" / "copy"))
    with pytest.raises(RunDirectoryError, match=f"has the same checkpoints as {run}") as caught:
        RunDirectory.resume(copy, {})
    assert f"warm_start={run}" in caught.value.fix
    annotate(copy, archived=True)
    assert list(removable(list_runs(tmp_path / "runs"))) == []
    annotate(run, archived=True)
    assert [remove(one) for one in removable(list_runs(tmp_path / "runs"))] == [True, True]
    assert [path.name for path in folder.glob("step_*")] == ["step_000003"]


def test_a_start_that_failed_leaves_no_folder_behind(tmp_path: Path) -> None:
    run, disk = tmp_path / "runs" / "run", tmp_path / "disk"
    with pytest.raises(RunDirectoryError, match=r"paths\.checkpoints names a folder that does not exist"):
        RunDirectory.create(run, "name: run\n", {}, str(disk))
    assert not run.exists()
    disk.mkdir()
    RunDirectory.create(run, "name: run\n", {}, str(disk)).close()
    (first,) = disk.iterdir()
    again = RunDirectory.create(run, "name: run\n", {}, str(disk))
    again.close()
    assert again.replaced
    (second,) = disk.iterdir()
    assert (first != second, again.checkpoints_path) == (True, second)
    assert [remove(one) for one in removable(list_runs(tmp_path / "runs"))] == [True]
    assert (run.exists(), [*disk.iterdir()]) == (False, [])


def test_a_record_of_a_stranger_opens_no_folder(tmp_path: Path) -> None:
    run, folder = made(tmp_path)
    private = tmp_path / "private"
    (private / "step_000001").mkdir(parents=True)
    record = json.loads((run / RECORD).read_text())
    (run / RECORD).write_text(json.dumps(record | {"folder": str(private)}))
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoints_of(run)
    (run / RECORD).unlink()
    (run / RECORD).symlink_to(folder / "run.json")
    with pytest.raises(RunDirectoryError, match="symbolic link"):
        checkpoints_of(run)
    (run / RECORD).unlink()
    (run / RECORD).write_text('{"folder": 3}')
    with pytest.raises(RunDirectoryError, match="does not say where the run's checkpoints are"):
        checkpoints_of(run)
