"""A save that fails or is killed harms no checkpoint that was finished, and leaves nothing that the next does not clean."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.checkpoint import store
from lockstep.checkpoint.store import (
    check_space,
    clean,
    list_checkpoints,
    open_checkpoint,
    prune,
    save,
    step_name,
    verify_checkpoint,
)
from lockstep.errors import CheckpointError
from tests.checkpoint.saving import block, folders, saved, write

ROOT = Path(__file__).parents[2]


# --- failures while saving ------------------------------------------------------------------------------------------
def test_a_full_disk_leaves_the_others_and_no_rest(tmp_path: Path):
    saved(tmp_path, 1)

    def writer(folder: Path) -> None:
        write(folder, 2)
        with Path("/dev/full").open("wb") as file:  # the kernel answers ENOSPC
            file.write(b"x" * 100_000)

    with pytest.raises(CheckpointError, match=r"step 2 could not be saved: .*No space left") as caught:
        save(tmp_path, 2, writer, {})
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert folders(tmp_path) == ["step_000001"]
    assert open_checkpoint(tmp_path).step == 1


FULL_DISK = """
import sys, errno
from pathlib import Path
import torch
from lockstep.checkpoint.state import CheckpointState, ModelFiles, save_state
from lockstep.checkpoint.store import open_checkpoint
from lockstep.checkpoint import store
from lockstep.errors import CheckpointError
store.SPARE = 0
run = Path(sys.argv[1])
state = CheckpointState(1, {"w": torch.ones(100_000)}, {})
save_state(run, state, ModelFiles())
big = CheckpointState(2, {"w": torch.ones(700_000)}, {"m": torch.ones(1000)})
try:
    save_state(run, big, ModelFiles())
    sys.exit("the preflight let it through")
except CheckpointError as error:
    assert "needs 0.00 GiB" in error.what, error
type(big).bytes = property(lambda self: 0)  # an estimate that was wrong
for _ in range(20):
    try:
        save_state(run, big, ModelFiles())
        sys.exit("it fitted")
    except CheckpointError as error:
        assert "No space left" in str(error), error
assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
assert open_checkpoint(run).step == 1
"""


def test_a_disk_that_fills_up_for_real(tmp_path: Path):
    """A 2 MiB file system of our own, in a user namespace where that is allowed."""
    command = f'mount -t tmpfs -o size=2m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}"'
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, FULL_DISK], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError, match=r"needs \d+\.\d\d GiB of disk, but only \d+\.\d\d GiB are free"):
        save(tmp_path, 1, lambda folder: pytest.fail("the writer was called"), {}, bytes_needed=free + 1)
    assert folders(tmp_path) == []
    check_space(tmp_path, max(0, free - (1 << 30)))


def test_an_error_of_the_writer_is_passed_on_and_leaves_no_rest(tmp_path: Path):
    def writer(folder: Path) -> None:
        write(folder, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, writer, {})
    assert folders(tmp_path) == []


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved: .*File exists"):
        saved(tmp_path, 1)
    (tmp_path / "checkpoints").unlink()
    saved(tmp_path, 1)
    (tmp_path / "checkpoints" / ".tmp-step_000002").write_text("")
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved: .*\.tmp-step_000002"):
        saved(tmp_path, 2)
    assert open_checkpoint(tmp_path).step == 1


def test_a_rest_of_a_killed_save_is_named_ignored_and_cleaned_by_the_next(tmp_path: Path):
    saved(tmp_path, 7)
    rest = tmp_path / "checkpoints" / ".tmp-step_000008"
    rest.mkdir()
    write(rest, 8)
    assert [(info.step, info.complete) for info in list_checkpoints(tmp_path)] == [(7, True), (8, False)]
    info = open_checkpoint(tmp_path)
    assert info.step == 7
    assert rest.exists()
    saved(tmp_path, 9)
    assert folders(tmp_path) == ["step_000007", "step_000009"]


def test_the_newer_rest_is_in_the_notes(tmp_path: Path):
    saved(tmp_path, 7)
    for step in (5, 8):
        (tmp_path / "checkpoints" / f".tmp-{step_name(step)}").mkdir()
    assert open_checkpoint(tmp_path).notes == (".tmp-step_000008 was passed over: its save did not finish",)


def test_cleaning_leaves_strangers_alone(tmp_path: Path):
    for name in (".keep-step_000001", "notes", ".tmp-other", "step_1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert clean(tmp_path) == ()
    assert list_checkpoints(tmp_path) == []


def test_kill_at_random_moments_never_harms_a_finished_checkpoint(tmp_path: Path):
    """A process that does nothing but save is killed 20 times; each time the finished steps are whole, byte for byte."""
    rng = random.Random(4)
    first, rests = 1, 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.saving", str(tmp_path), str(first)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        done = int(process.stdout.readline())  # one is finished: from now on any moment will do
        time.sleep(rng.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        printed = [int(line) for line in process.stdout.read().split()]
        process.wait()
        done = max([done, *printed])
        infos = list_checkpoints(tmp_path)
        rests += sum(not info.complete for info in infos)
        assert all(info.path.name.startswith(".tmp-") for info in infos if not info.complete)
        newest = open_checkpoint(tmp_path)
        assert newest.step in (done, done + 1)  # the kill may come between the rename and the print
        for info in infos:
            if info.complete:
                verify_checkpoint(info.path)
                assert (info.path / "part_5.safetensors").read_bytes() == block(info.step, 5)
        complete = [info.step for info in infos if info.complete]
        assert complete == list(range(complete[0], newest.step + 1))
        prune(tmp_path, keep_last=2)
        first = newest.step + 1
    assert rests > 0, "no kill hit a save: the test shows nothing"


@pytest.mark.parametrize("place", ["writer", "COMMIT.json", "rename"])
def test_kill_at_chosen_moments_of_a_save(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch):
    """Killed inside the writer, after the last file before COMMIT.json, and after COMMIT.json before the rename."""
    saved(tmp_path, 1)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def writer(folder: Path) -> None:
        write(folder, 2)
        if place == "writer":
            die()

    child = os.fork()
    if not child:
        try:
            if place == "COMMIT.json":
                monkeypatch.setattr(store, "commit", die)
            if place == "rename":
                monkeypatch.setattr(store, "_publish", die)
            save(tmp_path, 2, writer, {})
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "checkpoints" / ".tmp-step_000002" / "COMMIT.json").exists() == (place == "rename")
    info = open_checkpoint(tmp_path)
    assert info.step == 1
    assert info.notes == (".tmp-step_000002 was passed over: its save did not finish",)
    saved(tmp_path, 2)
    assert folders(tmp_path) == ["step_000001", "step_000002"]
