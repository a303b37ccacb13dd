"""What an environment starts ends with it, and it ends with the run, whatever it does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.config import schema
from lockstep.envs.runners import Fault, ProcessRunner
from lockstep.types import Prompt, Turn

ENV = """
import ctypes, datetime, os, subprocess
from lockstep.types import Message, Turn

class Own:
    def start(self, seed):
        return Turn((Message(role="user", content="go"),))
    def step(self, reply):
        if reply == "child":
            child = subprocess.Popen(["sleep", "1000"])
            return Turn(metrics={"pid": child.pid, "own": os.getpid()})
        if reply == "child and end":
            child = subprocess.Popen(["sleep", "1000"])
            print(child.pid, file=open(__file__ + ".pid", "w"), flush=True)
            os._exit(0)
        if reply == "hold":
            print(os.getpid(), file=open(__file__ + ".pid", "w"), flush=True)
            ctypes.PyDLL(None).sleep(1000)  # no other thread of Python runs meanwhile
        if reply == "grow":
            self.kept = bytearray(400 << 20)
        return Turn(extracted=str(len(reply)))
"""
PROMPT = Prompt("p", ({"role": "user", "content": "go"},), "", data={"seed": 1})


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def soon_gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone(pid)


def settings(folder: Path) -> schema.EnvTask:
    (folder / "own.py").write_text(ENV)
    return schema.EnvTask(path=f"{folder}/own.py:Own")


def answer(runner: ProcessRunner) -> Turn | Fault:
    while not (answers := runner.poll(10.0)):
        pass
    ((_, found),) = answers
    return found


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[ProcessRunner]:
    made = ProcessRunner(settings(tmp_path), 60.0)
    made.begin("x", PROMPT, 1)
    assert isinstance(answer(made), Turn)
    yield made
    made.close()


def test_what_an_environment_starts_ends_with_it(runner: ProcessRunner) -> None:
    runner.step("x", "child")
    turn = answer(runner)
    assert isinstance(turn, Turn)
    pids = [int(turn.metrics["pid"]), int(turn.metrics["own"])]
    assert not any(map(gone, pids))
    runner.end("x")
    assert all(map(soon_gone, pids))


def test_what_it_leaves_behind_is_ended(runner: ProcessRunner, tmp_path: Path) -> None:
    runner.step("x", "child and end")
    assert answer(runner) == Fault("error", "its process ended")
    assert soon_gone(int((tmp_path / "own.py.pid").read_text()))


def test_long_replies_and_growth_are_no_reason_to_end(runner: ProcessRunner) -> None:
    for reply in ("x" * 3_000_000, "grow", "after"):  # more than a pipe holds; more than a grader may keep
        runner.step("x", reply)
        assert answer(runner) == Turn(extracted=str(len(reply)))


def test_an_environment_that_holds_python_ends_with_the_run(tmp_path: Path) -> None:
    made = settings(tmp_path)
    script = (
        "import sys, time\n"
        "from lockstep.config import schema\nfrom lockstep.envs.runners import ProcessRunner\n"
        "from lockstep.types import Prompt\n"
        f"runner = ProcessRunner(schema.EnvTask(path={made.path!r}), 600.0)\n"
        "runner.begin('x', Prompt('p', ({'role': 'user', 'content': 'go'},), '', data={'seed': 1}), 1)\n"
        "while not runner.poll(1.0): pass\n"
        "runner.step('x', 'hold')\ntime.sleep(1000)\n"
    )
    file = tmp_path / "own.py.pid"
    run = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 120
        while not (file.exists() and file.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = int(file.read_text())
        time.sleep(1.0)  # until it holds Python
        assert not gone(pid)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert soon_gone(pid)
