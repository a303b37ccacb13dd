"""Run code that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Alive = Callable[[], None]


class HungError(Exception):
    """The work gave no sign of life in time."""


def run_watched(work: Callable[[Alive], T], seconds: float) -> T:
    """Return the result of work(alive), which must call alive() at least every `seconds`; its exceptions pass through.

    The work runs in a daemon thread: Python cannot end a thread, so hung work goes on until the process ends, which after
    HungError should be soon.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    beat = [time.monotonic()]
    done = threading.Event()

    def alive() -> None:
        beat[0] = time.monotonic()

    def run() -> None:
        try:
            results.append(work(alive))
        except BaseException as error:  # passed to the caller, below
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True, name="lockstep-watched").start()
    while not done.wait(timeout=max(0.0, beat[0] + seconds - time.monotonic())):
        if time.monotonic() - beat[0] >= seconds:
            raise HungError(f"no progress in {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
