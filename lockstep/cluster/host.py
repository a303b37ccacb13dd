"""The process of a worker: `python -m lockstep.cluster.host DESCRIPTOR`, started by child.py.

Its first message is [place, class of the worker]; each later one a call, [method, arguments by name], which is answered in turn.
This module imports nothing large: it must hear of its driver's end while it loads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any

from lockstep.cluster import wire
from lockstep.errors import LockstepError

OK, FAILED = "ok", "failed"
TRAINER, SAMPLER = "lockstep.cluster.worker:Worker", "lockstep.cluster.sampler:Sampler"
"""Classes of workers."""
UPDATE = ("learner.begin_update", "train", "learner.finish_update", "push")
"""Methods after whose failure no call is made: the next, already sent, would exchange other tensors than the other ranks do, or
sample with weights that are not proven.
"""
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_DRIVER_ENDED = signal.SIGHUP
"""Sent by the kernel, perhaps several times: the stacks are written, and a second later the process ends."""


class Host:
    """Runs one worker. Its results are [OK, value] or [FAILED, plain Failure]."""

    def __init__(self, place: wire.Place, worker: str) -> None:
        self._place, self._class = place, worker
        self._worker: Any = None
        folder, rank = Path(place.folder), place.rank
        self._log = (folder / f"rank_{rank}.log").open("a", buffering=1, encoding="utf-8")
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        self._stacks = (folder / f"stacks_{rank}.txt").open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        faulthandler.register(_DRIVER_ENDED, file=self._stacks, all_threads=True, chain=True)

    def call(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        """Call a method of the worker, which is made at the first call, or of a part of it."""
        try:
            from lockstep.plain_values import from_plain, kinds_of, to_plain

            if self._worker is None:
                self._worker = resolve_name(self._class)(self._place)
            kinds, returned = kinds_of(self._class, method)
            given = {name: from_plain(kinds[name], value) for name, value in arguments.items()}
            return [OK, to_plain(returned, attrgetter(method)(self._worker)(**given))]
        except LockstepError as error:
            return [FAILED, [type(error).__name__, error.what, error.where, error.fix, time.time()]]
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            return [FAILED, ["", what, "", "", time.time()]]


def main() -> None:
    """Load what most workers need, take a place, and answer calls until the driver ends."""
    # a handler gets its signal's number, SIGHUP's is 1: alarm(1) ends the process, even if C code lets Python do nothing
    _LIBC.signal(_DRIVER_ENDED, _LIBC.alarm)
    _ask_kernel_for(_DRIVER_ENDED)
    channel, messages = Connection(int(sys.argv[1])), SimpleQueue[Any]()
    threading.Thread(target=_listen, args=(channel, messages), daemon=True).start()
    with suppress(Exception):  # raised again at the first call, whose answer reports it
        resolve_name(TRAINER)
    place, worker = messages.get()
    host, failed = Host(wire.Place(*place), worker), None
    while True:
        method, arguments = messages.get()
        answer = failed or host.call(method, arguments)
        failed = answer if answer[0] == FAILED and method in UPDATE else failed
        channel.send_bytes(wire.dumps(answer))


def _ask_kernel_for(sent: signal.Signals) -> None:
    """Have the kernel (Linux) send this process a signal when its driver ends: one for each thread that asks."""
    with suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, sent)


def _listen(channel: Connection, messages: SimpleQueue[Any]) -> None:
    """Take messages as they come, so that the driver never waits to send one; end the process with the driver."""
    _ask_kernel_for(signal.SIGCONT)  # if it is stopped it takes no other signal
    with suppress(EOFError, OSError):
        while True:
            messages.put(wire.loads(channel.recv_bytes()))
    time.sleep(1.0)  # the stacks come first
    os._exit(1)


if __name__ == "__main__":
    main()
