from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from lockstep.workers.watched import HungError, run_watched


def test_results_and_exceptions_pass_through():
    assert run_watched(lambda alive: 7, seconds=1.0) == 7
    with pytest.raises(ZeroDivisionError):
        run_watched(lambda alive: 1 // 0, seconds=1.0)


def test_work_that_hangs_is_given_up():
    release = threading.Event()
    start = time.monotonic()
    with pytest.raises(HungError, match=r"no progress in 0.2 s"):
        run_watched(lambda alive: release.wait(30), seconds=0.2)
    assert time.monotonic() - start < 5
    release.set()


def test_signs_of_life_extend_the_time():
    def slow(alive):
        for _ in range(10):
            time.sleep(0.1)
            alive()
        return "done"

    assert run_watched(slow, seconds=0.8) == "done"


NO_ROOM = """
import psutil, resource, sys, threading
from lockstep.errors import MachineError
from lockstep.workers.watched import run_watched
threading.stack_size(1 << 20)
assert run_watched(lambda alive: 7, 5.0) == 7
room = psutil.Process().memory_info().vms + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (room, -1))
try:
    print(run_watched(lambda alive: 7, 1.0))
except MachineError:
    print("no room")
"""


@pytest.mark.parametrize("room", [0, (1 << 20) + 4096, (1 << 20) + 8192, (1 << 20) + 12288])
def test_without_room_for_a_thread_it_is_an_error_and_not_a_wait(room):
    """With room for its stack alone, a thread begins and dies before it can say so."""
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(room)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() in ("no room", "7"), done.stderr
    assert room or done.stdout.strip() == "no room"
