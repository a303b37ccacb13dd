"""Runs of strangers: links, pipes, damaged and mistyped files are refused by name, and nothing outside the run is touched."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.track.console import Console
from lockstep.track.jsonl import JsonlFile, read_jsonl
from lockstep.track.lock import Lock, read_holder
from lockstep.track.rollouts import read_rollouts, rollout_path, write_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events, read_metrics
from tests.track.runs import FACTS, finished_run, groups

DEEP = '{"a":' * 100_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return finished_run(tmp_path / "run", steps=13)


@pytest.mark.parametrize(
    "name",
    ["run.lock", "log.txt", "metrics.jsonl", "events.jsonl", "recipe.yaml", "rollouts/step_000099.parquet", "scores"],
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_a_run_is_refused_and_what_it_leads_to_is_left_alone(
    tmp_path: Path, run: Path, name: str, kind: str
) -> None:
    target = tmp_path / "diary.txt"
    target.write_text("dear diary")
    place = run / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target) if kind == "link" else os.mkfifo(place)
    for attempt in (lambda: RunDirectory.open(run), lambda: RunDirectory.resume(run, FACTS)):
        with pytest.raises(RunDirectoryError, match=f"{name}: this is (a symbolic link|not a regular file)"):
            attempt()
    assert target.read_text() == "dear diary"


def test_no_file_of_a_run_is_opened_through_a_link(tmp_path: Path) -> None:
    """Each opening by itself: a link may be put there after the run was opened, or while it is made."""
    target, link = tmp_path / "diary.txt", tmp_path / "link"
    target.write_text("dear diary")
    link.symlink_to(target)
    for opening in (Lock, Console, JsonlFile, read_jsonl):
        with pytest.raises(RunDirectoryError, match="symbolic link"):
            opening(link)
    assert target.read_text() == "dear diary"


def test_a_link_with_the_name_of_a_temporary_file_is_not_written_through(tmp_path: Path, run: Path) -> None:
    target = tmp_path / "diary.txt"
    target.write_text("dear diary")
    with RunDirectory.resume(run, FACTS) as opened:
        path = rollout_path(opened, 14)
        path.with_name(f".{path.name}.{os.getpid()}.tmp").symlink_to(target)
        write_rollouts(opened, 14, groups(14), [[0.5, -0.5], [-0.5, 0.0]])
    assert target.read_text() == "dear diary"
    assert len(read_rollouts(RunDirectory.open(run), 14)) == 4


def test_a_flipped_bit_in_rollouts_never_reads_as_other_data(run: Path) -> None:
    opened = RunDirectory.open(run)
    path = rollout_path(opened, 13)
    before, content = read_rollouts(opened, 13), path.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(400):
        bit = chance.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert read_rollouts(opened, 13) == before  # the bit meant nothing, as in the name of the writing program
        except RunDirectoryError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", {"attempts": "two"}),
        ("manifest.json", {"attempts": []}),
        ("manifest.json", {"format": "1"}),
        ("manifest.json", {"code": ["x"]}),
        ("manifest.json", {"gpu": [{"name": 7}]}),
        ("manifest.json", {"command": 7}),
        ("manifest.json", {"parent": {"run": "x"}}),
        ("metrics.jsonl", {"step": "one"}),
        ("metrics.jsonl", {"step": 1e400}),
        ("metrics.jsonl", {"time": "yesterday"}),
        ("metrics.jsonl", {"time": "2026-11-21T03:30:00"}),
        ("metrics.jsonl", {"metrics": {"reward/mean": [1]}}),
        ("metrics.jsonl", {"metrics": {"reward/mean": 10**400}}),
        ("metrics.jsonl", {"proof": {"version": 1}}),
        ("metrics.jsonl", {"proof": 3}),
        ("events.jsonl", {"message": 5}),
        ("events.jsonl", {"step": "x"}),
        ("events.jsonl", {"facts": []}),
        ("events.jsonl", {"more": 1}),
    ],
)
def test_values_of_another_type_are_refused_by_file_and_name(run: Path, name: str, change: dict[str, Any]) -> None:
    path = run / name
    lines = path.read_text().split("\n") if name.endswith("l") else [path.read_text()]
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | change), *lines[1:]]))
    with pytest.raises(RunDirectoryError, match=name):
        everything(run)


@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl", "events.jsonl"])
def test_json_that_is_nested_too_deep_is_refused_by_name(run: Path, name: str) -> None:
    (run / name).write_text(DEEP + "\n")
    with pytest.raises(RunDirectoryError, match=name):
        everything(run)


def everything(path: Path) -> None:
    opened = RunDirectory.open(path)
    read_metrics(opened)
    read_events(opened)


@pytest.mark.parametrize("text", [DEEP, "[]", '{"host": 1, "pid": 1e999, "started": 0, "since": ""}', "\xff"])
def test_a_lock_file_that_names_no_holder_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.lock").write_bytes(text.encode("latin-1"))
    assert read_holder(tmp_path / "run.lock") is None
    Lock(tmp_path / "run.lock").release()


FULL = """
import resource, signal, sys
from lockstep.errors import StorageError
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import RunWriter
from lockstep.track.console import Console
from lockstep.track.rollouts import write_rollouts
from tests.track.runs import groups, metrics, proof
from tests.evaluation.scores import score
from lockstep.evaluation.records import score_path, write_score
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with RunDirectory.resume(sys.argv[1], {}) as run, RunWriter(run) as writer:
    console = Console(run.log_path)
    largest = max(run.metrics_path.stat().st_size, run.events_path.stat().st_size) + 300
    refused = 0
    for limit, write in (
        (largest, lambda: writer.step(14, metrics(14), proof(14))),
        (largest, lambda: writer.event("note", "x" * 2 * largest)),
        (largest, lambda: console.message("x" * 2 * largest)),
        (500, lambda: write_rollouts(run, 14, groups(14) * 200, [[0.5, -0.5], [-0.5, 0.0]] * 200)),
        (500, lambda: write_score(score_path(run.path, 14, "greedy"), score([True] * 2000))),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        try:
            write()
        except StorageError as error:
            assert error.exit_code == 6 and "MiB are free" in str(error) and str(run.path) in str(error), error
            refused += 1
    assert refused == 5, refused
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    writer.event("note", "small")
"""


def test_a_disk_that_refuses_is_a_storage_error_and_leaves_no_half_line(run: Path) -> None:
    """A limit on the size of files stands for the full disk: the kernel writes what fits and refuses the rest."""
    before = [row.step for row in read_metrics(RunDirectory.open(run))]
    done = subprocess.run([sys.executable, "-c", FULL, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opened = RunDirectory.open(run)
    assert [row.step for row in read_metrics(opened)] == before
    assert [event.message for event in read_events(opened)][-1] == "small"
    assert not list(run.rglob("*.torn")) + list(run.rglob(".*.tmp"))
    assert not rollout_path(opened, 14).exists()


def test_an_output_that_is_full_ends_the_printing_and_not_the_run(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, Console(tmp_path / "log.txt", stream=full) as console:  # noqa: PTH123
        console.message("one")
        console.message("two")
    lines = [line.split("  ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines[0] == "one"
    assert "No space left on device" in lines[1]
    assert lines[2] == "two"


def test_a_run_whose_files_come_and_go_is_read(run: Path) -> None:
    """Another process writes there: between listing a folder and looking at a file, the file may be renamed or removed."""
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for number in range(200):
                (run / "rollouts" / f".{number}.tmp").touch()
            for number in range(200):
                (run / "rollouts" / f".{number}.tmp").unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            RunDirectory.open(run)
    finally:
        over.set()
        thread.join()
