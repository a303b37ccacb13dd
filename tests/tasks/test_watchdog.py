from __future__ import annotations

import threading
import time

import pytest

from lockstep.tasks.watchdog import HungError, run_watched


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
