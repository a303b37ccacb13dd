"""One process of a run, for the driver that starts it: its messages, and what ends it.

This module imports nothing large: processes may be started while the driver itself still imports.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeAlias

from lockstep.cluster import wire
from lockstep.workers.process import own_environment

END_SECONDS = 5.0
"""Longest wait for the end of a process that was killed."""
Inbox: TypeAlias = "SimpleQueue[tuple[Child, Any, float]]"
"""Messages by the process that sent them, and when they came, on the monotonic clock; ENDED for the end of one."""
ENDED = object()


class Child:
    """A process that loads what a worker needs as soon as it runs, and becomes a worker with the first message.

    Two threads keep the driver from waiting for it: one sends, one receives.
    """

    def __init__(self, threads: int) -> None:
        """Start the process. `threads`: of its libraries, unless OMP_NUM_THREADS says how many."""
        threads_of_libraries = os.environ.get("OMP_NUM_THREADS", str(threads))
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.cluster.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # until it has a place, and with it a log
                stderr=subprocess.DEVNULL,
                env=own_environment(OMP_NUM_THREADS=threads_of_libraries, GLOO_SOCKET_IFNAME="lo"),  # this machine only
                start_new_session=True,  # an interrupt is for the driver; and the whole group can be killed
            )
        self.pid = self._popen.pid
        self._channel = Connection(ours.detach())
        self._outbox: SimpleQueue[bytes] = SimpleQueue()

    def connect(self, inbox: Inbox) -> None:
        """Have all that the process sends put into `inbox`."""
        threading.Thread(target=self._send, daemon=True).start()
        threading.Thread(target=self._receive, args=(inbox,), daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message some time; does not wait."""
        self._outbox.put(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        self._popen.send_signal(number)

    def end(self, grace: float = 0.0) -> str:
        """Kill the process with all that it has started; returns how it ended. `grace`: seconds to end by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(grace)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_SECONDS)
        self._outbox.put(b"")
        code = self._popen.returncode
        if code is None:
            return "it cannot be killed"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _send(self) -> None:
        with suppress(OSError):
            while message := self._outbox.get():
                self._channel.send_bytes(message)

    def _receive(self, inbox: Inbox) -> None:
        with suppress(EOFError, OSError):
            while True:
                message, came = self._channel.recv_bytes(), time.monotonic()
                inbox.put((self, wire.loads(message), came))
        inbox.put((self, ENDED, time.monotonic()))


_AHEAD: list[Child] = []


@contextmanager
def started_ahead(count: int) -> Iterator[None]:
    """Start processes that the block will ask for with `take`, so that they load while it does. The others end with it.

    Nothing is started on a machine with fewer than two cores for each: there it would only slow the block down.
    """
    cores = os.cpu_count() or 1
    if 2 * count <= cores:
        _AHEAD.extend(Child(max(1, cores // count)) for _ in range(count))
    try:
        yield
    finally:
        while _AHEAD:
            _AHEAD.pop().end()


def take(threads: int) -> Child:
    """Return a process that was started ahead, else a new one."""
    return _AHEAD.pop(0) if _AHEAD else Child(threads)
