from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.errors import RunLockedError
from lockstep.track.lock import Lock, read_holder

HOLD = """
import sys, time
from pathlib import Path
from lockstep.track.lock import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""
HOLD_WITH_CHILD = """
import os, sys, time
from pathlib import Path
from lockstep.track.lock import Lock
lock = Lock(Path(sys.argv[1]))
child = os.fork()
print(child or "held", flush=True)
time.sleep(600)
"""
KEEP_IN_CHILD = "kept = os.dup(lock._descriptor); child = os.fork()"


def hold(path: Path, program: str = HOLD) -> subprocess.Popen[str]:
    """Start a process that takes the lock; returns when it, and a child that it may have, say that they are ready."""
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2 if "fork" in program else 1):
        assert process.stdout.readline()
    return process


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    other = hold(path)
    try:
        with pytest.raises(RunLockedError, match=f"process {other.pid} on {socket.gethostname()}"):
            Lock(path)
    finally:
        other.kill()
        other.wait()


def test_the_kernels_lock_holds_even_if_the_file_lost_its_content(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    other = hold(path)
    try:
        os.truncate(path, 0)
        with pytest.raises(RunLockedError, match="another process"):
            Lock(path)
    finally:
        other.kill()
        other.wait()


def test_a_dead_holder_whose_child_keeps_the_lock_is_said_to_be_dead(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    parent = hold(path, HOLD_WITH_CHILD.replace("child = os.fork()", KEEP_IN_CHILD))
    children = psutil.Process(parent.pid).children()
    try:
        parent.kill()
        parent.wait()
        with pytest.raises(RunLockedError, match=f"end the children of process {parent.pid}"):
            Lock(path)
    finally:
        for child in children:
            child.kill()


def test_the_same_process_cannot_take_it_twice(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "run.lock")
    with pytest.raises(RunLockedError, match=str(os.getpid())):
        Lock(tmp_path / "run.lock")
    lock.release()
    Lock(tmp_path / "run.lock").release()


def test_the_lock_of_a_killed_process_is_taken_over_and_says_from_whom(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    other = hold(path)
    started = psutil.Process(other.pid).create_time()
    other.send_signal(signal.SIGKILL)
    other.wait()
    lock = Lock(path)
    assert lock.taken_from is not None
    assert (lock.taken_from.pid, lock.taken_from.host) == (other.pid, socket.gethostname())
    assert lock.taken_from.started == pytest.approx(started, abs=2)
    assert lock.taken_from.alive is False
    holder = read_holder(path)
    assert holder is not None
    assert holder.pid == os.getpid()
    assert holder.alive is True
    lock.release()


def test_a_killed_process_that_nobody_waits_for_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    other = hold(path)
    try:
        other.kill()
        while psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        holder = read_holder(path)
        assert holder is not None
        assert holder.alive is False
        Lock(path).release()
    finally:
        other.wait()


def test_a_lock_released_in_order_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lock = Lock(path)
    lock.release()
    lock.release()
    assert not lock.held
    again = Lock(path)
    assert again.taken_from is None
    again.release()


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    parent = hold(path, HOLD_WITH_CHILD)
    children = psutil.Process(parent.pid).children()
    try:
        assert len(children) == 1
        parent.kill()
        parent.wait()
        assert children[0].is_running()
        lock = Lock(path)
        assert lock.taken_from is not None
        lock.release()
    finally:
        for child in children:
            child.kill()


def test_a_pid_that_was_given_to_another_process_does_not_look_alive(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    stale = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.time() - 1e6,
        "since": "2026-01-01T00:00:00Z",
    }
    path.write_text(json.dumps(stale))
    lock = Lock(path)
    assert lock.taken_from is not None
    lock.release()


def test_a_live_holder_is_respected_where_the_file_system_does_not_enforce_locks(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    me = psutil.Process()
    path.write_text(
        json.dumps(
            {"host": socket.gethostname(), "pid": me.pid, "started": me.create_time(), "since": "2026-01-01T00:00:00Z"}
        )
    )
    with pytest.raises(RunLockedError, match=f"process {me.pid}"):
        Lock(path)


def test_a_holder_on_another_host_cannot_be_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 0.0, "since": "2026-01-01T00:00:00Z"}))
    lock = Lock(path)
    assert lock.taken_from is not None
    assert lock.taken_from.alive is None
    lock.release()
