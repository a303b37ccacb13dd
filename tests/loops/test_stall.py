"""The watchdog on real processes: an engine that is stopped, a grader, a loss, a write and native code that hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lockstep.config.health import Stall
from lockstep.errors import Stalled
from lockstep.run import watchdog
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events, read_metrics
from tests.loops.runs import NO_EVAL, words

ROOT = Path(__file__).parents[2]
STALL = "health.stall={least_s: 6, first_s: 120, times: 3}"
TRAIN = """
import sys
from lockstep.cli import main
sys.exit(main(sys.argv[1:]))
"""
WITH_CHILD = """
import sys
import lockstep.build.build as build
from tests.rollout.vllm import native_child
folder = sys.argv.pop(1)


def engine(model, *, slots, stop_ids, decode, routes=False):
    assert not routes, "the engine process of this test records no routes"
    return native_child.start(folder, slots=slots, stop_ids=sorted(stop_ids))


build.native_engine = engine
from lockstep.cli import main
sys.exit(main(sys.argv[1:]))
"""
HANGS = """
import time
from pathlib import Path
import torch
from lockstep.algorithms.losses import reinforce

SEEN = []


def loss(inputs):
    SEEN.append(1)
    if len(SEEN) > 3:
        time.sleep(600)  # the hang
    return reinforce(inputs)


def grade(prompt, reply):
    log = Path(__file__).parent / "runs" / "run" / "log.txt"
    if log.exists() and "  step  2/" in log.read_text():
        time.sleep(600)  # the hang
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2
"""


def started(code: str, *args: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < until
        time.sleep(0.1)


def ended(process: subprocess.Popen[str], folder: Path, phase: str) -> tuple[str, str]:
    """The output and stall.txt of a run that its watchdog ended in `phase`."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == Stalled.exit_code == 9, output
    assert f"the run stands still: phase {phase} has made no progress for" in output
    assert "stall.txt there has the stacks" in output
    run = RunDirectory.open(folder / "runs" / "run")
    (event,) = [event for event in read_events(run) if event.kind == "stalled"]
    assert f"phase {phase} " in event.message
    stacks = (run.path / "stall.txt").read_text()
    assert stacks.startswith(f"{run.path}: the run stands still")
    assert "most recent call first" in stacks
    return output, stacks


def test_an_engine_process_that_is_stopped_ends_the_run_with_its_stack(tmp_path: Path, tiny_model_dir: Path) -> None:
    asked = words(tmp_path, tiny_model_dir, NO_EVAL, STALL, "steps=60", "sync.transport=copy", "save.every=60")
    process = started(WITH_CHILD, str(tiny_model_dir), "train", *asked)
    log = tmp_path / "runs" / "run" / "log.txt"
    wait_for(lambda: log.exists() and "  step  3/60" in log.read_text(), process)
    (engine,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "tests.rollout.vllm.native_child" in child.cmdline()
    ]
    engine.send_signal(signal.SIGSTOP)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 9, output
    stacks = (tmp_path / "runs" / "run" / "stall.txt").read_text()
    assert f"child process {engine.pid}, stopped" in stacks
    assert "lockstep/rollout/vllm/process.py" in stacks  # where the run waits
    assert "lockstep/rollout/vllm/serve.py" in stacks or "lockstep/rollout/native.py" in stacks  # where the engine was
    gone, _ = psutil.wait_procs([engine], timeout=60)  # the kernel ends it with the run, some time
    assert gone or engine.status() == psutil.STATUS_ZOMBIE
    done = [row.step for row in read_metrics(RunDirectory.open(tmp_path / "runs" / "run"))]
    assert done == list(range(1, len(done) + 1))


@pytest.mark.slow
def test_a_grader_that_hangs_within_its_time_limit_ends_the_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    asked = words(tmp_path, tiny_model_dir, NO_EVAL, STALL, "steps=20", f"task.verifier.path={tmp_path}/hangs.py:grade")
    (tmp_path / "hangs.py").write_text(HANGS)
    process = started(TRAIN, "train", *asked, "task.verifier.seconds=500")
    _, stacks = ended(process, tmp_path, "rollout")
    assert "hangs.py" in stacks.split("child process", 1)[1]


def test_a_loss_that_hangs_is_named_by_file_and_line(tmp_path: Path, tiny_model_dir: Path) -> None:
    asked = words(tmp_path, tiny_model_dir, NO_EVAL, STALL, "steps=20", f"algorithm.loss={tmp_path}/hangs.py:loss")
    (tmp_path / "hangs.py").write_text(HANGS)
    _, stacks = ended(started(TRAIN, "train", *asked), tmp_path, "update")
    line = 1 + HANGS.splitlines().index("        time.sleep(600)  # the hang")
    assert f'hangs.py", line {line} in loss' in stacks


WRITE = """
import os, sys
from pathlib import Path
from lockstep.config.health import Stall
from lockstep.run.watchdog import Watchdog
read, write = os.pipe()
with Watchdog(Stall(least_s=2, first_s=2, times=3, tier=sys.argv[2]), Path(sys.argv[1]), print) as dog:
    for _ in range(3):
        with dog.phase("save"):
            os.write(write, b"x" * 100)
    print("wrote", flush=True)
    with dog.phase("save"):
        os.set_blocking(read, True)
        import threading
        if sys.argv[2] == "warn":
            threading.Timer(6, lambda: os.read(read, 1 << 20)).start()
        os.write(write, b"x" * (1 << 16))  # as a disk that takes nothing
print("over", flush=True)
"""


@pytest.mark.parametrize(("tier", "code"), [("stop", 9), ("warn", 0)])
def test_a_write_that_takes_nothing_is_seen(tmp_path: Path, tier: str, code: int) -> None:
    process = started(WRITE, str(tmp_path), tier)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "phase save has made no progress for" in output
    assert ("over" in output) == (tier == "warn")
    line = 1 + next(i for i, text in enumerate(WRITE.splitlines()) if "as a disk" in text)
    assert f'File "<string>", line {line} in <module>' in (tmp_path / "stall.txt").read_text()


def test_progress_and_a_stopped_process_are_no_stall(tmp_path: Path) -> None:
    code = WRITE.split("    for _ in")[0] + (
        "    import time\n    print('ready', flush=True)\n    with dog.phase('evaluate'):\n"
        "        for _ in range(40):\n            time.sleep(0.2)\n            dog.beat()\nprint('over', flush=True)\n"
    )
    process = started(code, str(tmp_path), "stop")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(7)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "over\n")
    assert not (tmp_path / "stall.txt").exists()


def test_a_long_phase_that_goes_on_steadily_is_never_near_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second evaluation of an hour with an item a second; the time for native code was that of the phase's start."""
    clock, ends = [0.0], [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        watchdog.faulthandler, "dump_traceback_later", lambda seconds, **_: ends.append(clock[0] + seconds)
    )
    dog = watchdog.Watchdog(Stall(), tmp_path, pytest.fail)

    class Ticks:
        def wait(self, seconds: float) -> bool:
            clock[0] += 1
            dog.beat()
            assert clock[0] < ends[-1]
            return clock[0] % 3600 == 0

    monkeypatch.setattr(dog, "_thread", SimpleNamespace(is_alive=lambda: True))
    monkeypatch.setattr(dog, "_over", Ticks())
    for _ in range(2):
        with dog.phase("evaluate"):
            dog._look()
    assert len(ends) < 7300


def test_without_a_process_beside_it_the_timer_ends_the_run_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[bool] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, *, exit, file: ends.append(exit))
    dog = watchdog.Watchdog(Stall(), tmp_path, pytest.fail)
    monkeypatch.setattr(dog, "_thread", SimpleNamespace(is_alive=lambda: True))
    for beside in (None, SimpleNamespace(stdin=None)):
        monkeypatch.setattr(dog, "_guard", beside)
        dog._arm()
    assert ends == [True, False]


HELD = """
import ctypes, os, signal, sys
from pathlib import Path
from lockstep.config.health import Stall
from lockstep.run import watchdog
watchdog.Watchdog.allowance = 3.0
with watchdog.Watchdog(Stall(), Path(sys.argv[1]), print) as dog:
    while dog._guard is None:
        pass
    native = ctypes.PyDLL(None)  # its functions hold the interpreter
    getattr(native, "raise")(signal.SIGSTOP)
    native.pause()
"""


def test_native_code_that_holds_the_interpreter_is_killed_but_no_process_that_is_stopped(tmp_path: Path) -> None:
    process = started(HELD, str(tmp_path))
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, process)
    time.sleep(12)  # longer than what it may take
    assert process.poll() is None
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, output
    assert re.search(r'File "<string>", line \d+ in <module>', output)  # the stack
    assert f"lockstep: {tmp_path}: native code has held the interpreter for" in output
