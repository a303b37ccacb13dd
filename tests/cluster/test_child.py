"""Processes of a run: they end with their driver, and how they ended is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from lockstep.cluster import child, wire
from lockstep.cluster.child import ENDED, Child, started_ahead, take
from lockstep.plain_values import from_plain, to_plain

DRIVER = """
import sys, time
from lockstep.cluster.child import Child
from queue import SimpleQueue
children = [Child(1) for _ in range(2)]
for one in children:
    one.connect(SimpleQueue())
print(*(one.pid for one in children), flush=True)
time.sleep(600)
"""


def test_workers_end_with_a_driver_that_is_killed_even_if_they_are_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(word)) for word in driver.stdout.readline().split()]
        for _ in range(600):  # until they listen
            if all(worker.num_threads() > 1 for worker in workers):
                break
            time.sleep(0.1)
        workers[1].send_signal(signal.SIGSTOP)
        driver.kill()
        gone, alive = psutil.wait_procs(workers, timeout=10)
    assert (len(gone), alive) == (2, [])


BUSY = """
import sys, time
from lockstep.cluster import wire
from lockstep.cluster.child import Child
from lockstep.plain_values import to_plain
from queue import SimpleQueue
children = [Child(1) for _ in range(3)]
for rank, one in enumerate(children):
    one.connect(SimpleQueue())
    one.send(wire.dumps([[rank, 3, sys.argv[1], "", 1, 0], "tests.cluster.test_child:Echo"]))
    one.send(wire.dumps(["work", {"holding": to_plain(bool, rank == 1)}]))
print(*(one.pid for one in children), flush=True)
time.sleep(600)
"""


def test_workers_write_their_stacks_when_their_driver_is_killed(tmp_path: Path) -> None:
    """Also from within C code that lets no other thread run, and when they are stopped."""
    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(word)) for word in driver.stdout.readline().split()]
        for _ in range(600):
            if len(list(tmp_path.glob("working_*"))) == 3:
                break
            time.sleep(0.1)
        time.sleep(0.2)
        workers[2].send_signal(signal.SIGSTOP)
        driver.kill()
        gone, alive = psutil.wait_procs(workers, timeout=10)
    assert (len(gone), alive) == (3, [])
    for rank in range(3):
        stacks = (tmp_path / f"stacks_{rank}.txt").read_text()
        assert "in work\n" in stacks, rank
        assert stacks.rstrip().endswith("in _run_module_as_main"), rank  # whole


def test_a_process_answers_in_turn_and_tells_its_errors(tmp_path: Path) -> None:
    place = [0, 1, str(tmp_path), str(tmp_path / "rendezvous"), 1, 0]
    inbox: SimpleQueue[tuple[Child, Any, float]] = SimpleQueue()
    one = Child(1)
    one.connect(inbox)
    one.send(wire.dumps([place, "tests.cluster.test_child:Echo"]))
    for word in ("first", b"\0" * 3_000_000, "\ud800", 2**63):
        one.send(wire.dumps(["say", {"word": to_plain(Any, word)}]))
    one.send(wire.dumps(["fail", {}]))
    for word in ("first", b"\0" * 3_000_000, "\ud800", 2**63):
        sender, (state, value), _ = inbox.get(timeout=60)
        assert (sender, state, from_plain(list[Any], value)) == (one, "ok", [word, 0])
    _, (state, failure), _ = inbox.get(timeout=60)
    assert (state, failure[:4]) == ("failed", ["", "ValueError: odd", "", ""])
    assert "ValueError: odd" in (tmp_path / "rank_0.log").read_text()
    one.send(wire.dumps(["leave", {"code": to_plain(int, 7)}]))
    assert inbox.get(timeout=60)[:2] == (one, ENDED)
    assert one.end(grace=10) == "exit code 7"
    assert not psutil.pid_exists(one.pid)


class Echo:
    """A worker that only answers."""

    def __init__(self, place: wire.Place) -> None:
        self._rank, self._folder = place.rank, Path(place.folder)

    def say(self, word: Any) -> list[Any]:
        return [word, self._rank]

    def fail(self) -> None:
        raise ValueError("odd\nmore")

    def work(self, holding: bool) -> None:
        (self._folder / f"working_{self._rank}").touch()
        if holding:
            sum(range(10**11))
        time.sleep(600)

    def leave(self, code: int) -> None:
        os._exit(code)


def test_processes_that_were_started_ahead_are_taken_or_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    with started_ahead(2):
        ahead = [one.pid for one in child._AHEAD]
        taken, new = take(1), [take(1), take(1)][1]
        with started_ahead(0):
            assert taken.pid == ahead[0]
            assert new.pid not in ahead
    with started_ahead(1):
        (unused,) = child._AHEAD
    assert not psutil.pid_exists(unused.pid)
    with started_ahead(3):  # too many for the cores
        assert child._AHEAD == []
    assert [one.end() for one in (taken, new)] == ["SIGKILL"] * 2
