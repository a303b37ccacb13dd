from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import RunDirectoryError, RunLockedError, StorageError
from lockstep.track.files import atomic_path, write_atomic
from lockstep.track.rundir import RunDirectory, refuse_taken
from tests.track.runs import FACTS, RECIPE, write_steps

CREATE_AND_DIE = """
import os, sys
from lockstep.track import rundir
write, count = rundir.write_atomic, [int(sys.argv[2])]
def stop(path, content):
    count[0] -= 1
    if count[0] < 0:
        os._exit(9)
    write(path, content)
rundir.write_atomic = stop
rundir.RunDirectory.create(sys.argv[1], "name: a\\n", {})
"""


def test_a_runs_dir_that_is_a_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("", encoding="utf-8")
    with pytest.raises(RunDirectoryError, match=r"runs is a file, not a folder\n  to fix: choose another runs_dir"):
        refuse_taken(tmp_path / "runs" / "a")


def test_a_new_run_has_the_layout_and_both_files(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs" / "a", RECIPE, FACTS) as run:
        assert run.attempt == 1
        assert run.name == "a"
        assert sorted(p.name for p in run.path.iterdir()) == [
            "checkpoints", "manifest.json", "recipe.yaml", "rollouts", "run.lock", "scores",
        ]  # fmt: skip
    opened = RunDirectory.open(tmp_path / "runs" / "a")
    assert opened.recipe_yaml() == RECIPE
    manifest = opened.manifest()
    assert manifest["formula"] == FACTS["formula"]
    assert [attempt["attempt"] for attempt in manifest["attempts"]] == [1]
    assert manifest["attempts"][0]["pid"] == 4711


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with RunDirectory.create(path, RECIPE, FACTS) as run:
        write_steps(run, 1, 1)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(RunDirectoryError, match=rf"lockstep train --resume {re.escape(str(path))}"):
        RunDirectory.create(path, "name: other\n", {})
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("kept", "replaced"),
    [
        ("log.txt", True), ("events.jsonl", True), ("scores/step_000000_greedy.json", False), ("metrics.jsonl", False),
        ("checkpoints/step_000001/model.safetensors", False), ("notes.txt", False),
    ],
)  # fmt: skip
def test_a_start_that_failed_before_its_first_step_is_replaced(kept: str, replaced: bool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    RunDirectory.create(path, RECIPE, FACTS).close()
    (path / kept).parent.mkdir(parents=True, exist_ok=True)
    (path / kept).write_text("{}\n")
    if not replaced:
        with pytest.raises(RunDirectoryError, match="a run already exists here"):
            RunDirectory.create(path, "name: other\n", FACTS)
        assert (path / kept).read_text() == "{}\n"
        return
    with RunDirectory.create(path, "name: other\n", FACTS) as run:
        assert (run.replaced, run.attempt, run.recipe_yaml()) == (True, 1, "name: other\n")
        assert not (path / kept).exists()
        with pytest.raises(RunLockedError):  # it has not begun either, but it is being made
            RunDirectory.create(path, RECIPE, FACTS)


def test_a_folder_of_data_is_no_run_that_is_suggested(tmp_path: Path) -> None:
    for name in ("units", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "mine" / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(RunDirectoryError, match=r": mine$"):
        RunDirectory.open(tmp_path / "nope")


def test_files_that_are_not_of_a_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunDirectoryError, match=r"thesis\.tex"):
        RunDirectory.create(tmp_path, RECIPE, FACTS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create(tmp_path / "thesis.tex", RECIPE, FACTS)


def test_a_run_that_lost_its_manifest_is_not_taken_for_an_empty_place(tmp_path: Path) -> None:
    path = tmp_path / "a"
    RunDirectory.create(path, RECIPE, FACTS).close()
    (path / "checkpoints" / "step_000010").mkdir()
    (path / "manifest.json").unlink()
    with pytest.raises(RunDirectoryError, match="checkpoints"):
        RunDirectory.create(path, RECIPE, FACTS)


@pytest.mark.parametrize("writes", [0, 1])
def test_a_creation_that_was_killed_can_be_repeated(tmp_path: Path, writes: int) -> None:
    path = tmp_path / "a"
    died = subprocess.run([sys.executable, "-c", CREATE_AND_DIE, str(path), str(writes)], check=False)
    assert died.returncode == 9
    assert (path / "recipe.yaml").exists() == (writes == 1)
    with pytest.raises(RunDirectoryError, match="no manifest"):
        RunDirectory.open(path)
    with RunDirectory.create(path, RECIPE, FACTS) as run:
        assert run.recipe_yaml() == RECIPE
        assert run.taken_from is not None


def test_a_refused_writer_changes_nothing(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        before = run.manifest_path.read_bytes()
        with pytest.raises(RunLockedError):
            RunDirectory.resume(tmp_path / "a", FACTS)
        assert run.manifest_path.read_bytes() == before


def test_resuming_appends_an_attempt_and_keeps_the_rest(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "a", RECIPE, FACTS).close()
    (tmp_path / "a" / "rollouts" / ".step_000003.parquet.12.tmp").write_bytes(b"half")
    with RunDirectory.resume(tmp_path / "a", {**FACTS, "pid": 4712, "threads": 1}) as run:
        assert run.attempt == 2
        assert run.writable
        run.add_to_manifest({"plan": {"steps": 30}})
    manifest = RunDirectory.open(tmp_path / "a").manifest()
    assert [(a["attempt"], a["pid"]) for a in manifest["attempts"]] == [(1, 4711), (2, 4712)]
    assert manifest["threads"] == 2
    assert manifest["attempts"][1]["threads"] == 1
    assert manifest["plan"] == {"steps": 30}
    assert list((tmp_path / "a" / "rollouts").iterdir()) == []
    assert RunDirectory.open(tmp_path / "a").attempt == 2


@pytest.mark.parametrize("name", ["rollouts", "scores", "checkpoints", "code", "workers"])
def test_a_file_in_the_place_of_a_folder_is_named_before_the_run_goes_on(tmp_path: Path, name: str) -> None:
    RunDirectory.create(tmp_path / "a", RECIPE, FACTS).close()
    if (tmp_path / "a" / name).exists():
        (tmp_path / "a" / name).rmdir()
    (tmp_path / "a" / name).write_text("", encoding="utf-8")
    with pytest.raises(
        RunDirectoryError, match=rf"{name}: this is a file, but a folder .*\n  to fix: move the file away"
    ):
        RunDirectory.resume(tmp_path / "a", FACTS)
    assert len(RunDirectory.open(tmp_path / "a").manifest()["attempts"]) == 1


def test_a_reader_cannot_write_and_keys_of_the_directory_are_its_own(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run, pytest.raises(RunDirectoryError, match="attempts"):
        run.add_to_manifest({"attempts": []})
    with pytest.raises(RunDirectoryError, match="reading only"):
        RunDirectory.open(tmp_path / "a").add_to_manifest({"x": 1})
    with pytest.raises(RunDirectoryError, match="reading only"):
        run.add_to_manifest({"x": 1})


def test_what_is_not_a_run_is_refused_by_name(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "first", RECIPE, FACTS).close()
    with pytest.raises(RunDirectoryError, match=r"no such run(.|\n)*first"):
        RunDirectory.open(tmp_path / "frist")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory.open(tmp_path)
    manifest = tmp_path / "first" / "manifest.json"
    manifest.write_text('{"attempts": [{}]}')
    with pytest.raises(RunDirectoryError, match="not a manifest"):
        RunDirectory.open(tmp_path / "first")
    manifest.write_text('{"format": 99, "attempts": [{}]}')
    with pytest.raises(RunDirectoryError, match="its format is 99"):
        RunDirectory.open(tmp_path / "first")
    manifest.write_text("{")
    with pytest.raises(RunDirectoryError, match="is not JSON"):
        RunDirectory.open(tmp_path / "first")


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, json.dumps({"a": 1}))

    def write_half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text('{"a"')
            (tmp_path / "missing").read_text()

    with pytest.raises(StorageError, match="No such file"):
        write_half()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]
