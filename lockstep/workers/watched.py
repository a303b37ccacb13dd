"""Runs code that may never return, and raises an error when it makes no progress for too long."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lockstep.errors import MachineError

T = TypeVar("T")
Alive = Callable[[], None]

LOOK_S = 60.0
"""Longest wait between two looks at the clock; a lock takes no longer one than some weeks."""


class HungError(Exception):
    """The work gave no sign of life in time."""


def run_watched(work: Callable[[Alive], T], seconds: float) -> T:
    """Return the result of work(alive), which must call alive() at least every `seconds`; its exceptions pass through.

    The work runs in a daemon thread: Python cannot end a thread, so hung work goes on until the process ends, which
    after HungError should be soon. Raises MachineError if the machine has no room for a thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    beat = [time.monotonic()]
    started, done = False, threading.Event()

    def alive() -> None:
        beat[0] = time.monotonic()

    def run() -> None:
        nonlocal started
        try:
            started = True
            results.append(work(alive))
        except BaseException as error:  # passed to the caller, below
            errors.append(error)
        finally:
            done.set()

    try:
        # Not threading.Thread: its start() waits without limit for a thread that has no memory left to say that it runs.
        _thread.start_new_thread(run, ())
    except (RuntimeError, MemoryError) as error:
        raise _no_room() from error
    while not done.wait(timeout=min(LOOK_S, max(0.0, beat[0] + seconds - time.monotonic()))):
        if time.monotonic() - beat[0] >= seconds:
            raise HungError(f"no progress in {seconds:g} s") if started else _no_room()
    if errors:
        raise errors[0]
    return results[0]


def _no_room() -> MachineError:
    fix = "free memory, or raise the limits of address space and processes (ulimit -v, ulimit -u)"
    return MachineError(
        "no thread can be started: memory, address space or the number of processes is used up", fix=fix
    )
