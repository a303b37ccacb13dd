"""One worker process, for the process that owns it: started alone, or forked from a template that has loaded the work once."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from lockstep.errors import TaskError
from lockstep.workers import wire

START_SECONDS = 120.0
"""Longest time that a process may take to load its work."""
LATE_SECONDS = 0.1
"""A call that takes longer holds up no other: those that were sent with it are made elsewhere. The process leaves them after half
of that, so that it does not begin one that has been given away."""
_starter = cache(lambda pid: ThreadPoolExecutor(1, "lockstep-start"))
"""Starts processes of the process `pid`: the kernel ends them with the thread that did, and threads that grade end sooner."""
_GRACE = 0.05
"""Seconds in which a process that has closed its pipe ends by itself, so that how it ended says what happened."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a process, and the limits of one call."""

    module: str
    """Name of the module whose `load` gives the function that answers calls."""
    arguments: Mapping[str, Any]
    """Arguments of `load`."""
    where: str
    """Names the work in errors."""
    wall_seconds: float
    cpu_seconds: float | None = None
    """Processor time: unlike wall time it does not depend on what else the machine does."""
    memory: int | None = None
    """Bytes beyond what the process holds when it has loaded."""
    own_code: bool = False
    """The work is the user's: each process loads it by itself, as it may not survive a fork, and what it prints is shown."""
    file: str = ""
    """The user's file, whose lines errors name."""
    stateful: bool = False
    """Calls build on one another: the process may grow and start others, and lives until its owner ends it."""
    max_answer: int = 1 << 20
    """Longest answer in bytes."""

    @property
    def hello(self) -> dict[str, Any]:
        fields = ("module", "arguments", "file", "cpu_seconds", "memory", "stateful")
        return {name: getattr(self, name) for name in fields} | {"slow_seconds": LATE_SECONDS / 2}


class Slow(Exception):
    """The process gave no answer in time."""


class Gone(Exception):
    """The process has ended, or what it says is no answer."""


class Link:
    """The owner's ends of a process's two pipes. Nothing here waits but `exchange`."""

    def __init__(self, requests: int, answers: int, max_answer: int) -> None:
        self.requests, self.answers, self._max = requests, answers, max_answer
        self._unsent, self._received, self._searched = bytearray(), bytearray(), 0
        for descriptor in (requests, answers):
            os.set_blocking(descriptor, False)

    @property
    def pending(self) -> bool:
        """True if something waits for room in the pipe; `send` with nothing tries again."""
        return bool(self._unsent)

    def send(self, line: bytes = b"") -> None:
        """Write as much as the pipe takes now. Raises Gone."""
        self._unsent += line
        try:
            while self._unsent:
                del self._unsent[: os.write(self.requests, self._unsent[:65536])]
        except BlockingIOError:
            pass
        except BrokenPipeError as error:
            raise Gone from error

    def receive(self) -> dict[str, Any] | None:
        """Read what is there now; returns the first answer, if it is complete. Raises Gone."""
        answer = self._first()
        if answer is None:
            with suppress(BlockingIOError):
                data = os.read(self.answers, 65536)
                if not data:
                    raise Gone
                self._received += data
                answer = self._first()
        return answer

    def _first(self) -> dict[str, Any] | None:
        end = self._received.find(b"\n", self._searched)
        if (end + 1 or len(self._received)) > self._max:
            raise Gone
        if end < 0:
            self._searched = len(self._received)
            return None
        line, self._searched = bytes(self._received[:end]), 0
        del self._received[: end + 1]
        return _answer(line)

    def exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        """Send a line (none if it is empty) and wait for one. Raises Slow or Gone."""
        deadline = time.monotonic() + seconds
        (self.send if line else self.push)(line)
        answer = self._first()
        while answer is None:
            poll = select.poll()
            poll.register(self.answers, select.POLLIN)
            if self.pending:
                poll.register(self.requests, select.POLLOUT)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Slow
            answer = self.receive()
            if answer is None:
                self.push()
        return answer

    def push(self, line: bytes = b"") -> None:
        """Write as `send` does. That the process has ended is found after the answers that it gave before."""
        try:
            self.send(line)
        except Gone:
            self._unsent.clear()

    def close(self) -> None:
        os.close(self.requests)
        os.close(self.answers)


class Process:
    """A worker with its own process group. `end` must be called once."""

    def __init__(self, work: Work, pid: int, link: Link) -> None:
        self.pid, self.calls = pid, 0
        self.owed = 0
        """Answers to calls that were sent."""
        self._work, self.link, self._ready = work, link, False

    def start(self) -> None:
        """Wait until the work is loaded. Raises TaskError if the work refuses or does not come up, Gone if it ended."""
        if self._ready:
            return
        try:
            answer = self.link.exchange(wire.dumps(self._work.hello), START_SECONDS)
        except Slow as error:
            raise TaskError(
                f"the worker process needed more than {START_SECONDS:g} s to load this code",
                where=self._work.where,
                fix="do less work at the top level of the file",
            ) from error
        _refused(answer)
        self._ready = True

    def request(self, call: object, batch: int = 0) -> bytes:
        """Return the line that makes a call. Raises TypeError if it cannot be sent. `batch`: number of the first sent with it."""
        number = self.calls + 1
        line = wire.dumps({"id": number, "call": call, "batch": batch or number})
        self.calls = number
        return line

    def send(self, calls: Sequence[object]) -> None:
        """Make calls, up to one that cannot be sent. Raises TypeError if that is the first, and then nothing was sent."""
        lines, batch = list[bytes](), self.calls + 1
        for call in calls:
            try:
                lines.append(self.request(call, batch))
            except TypeError:
                if not lines:
                    raise
                break
        self.owed = len(lines)
        self.link.push(b"".join(lines))

    def answer(self, late: Callable[[], None]) -> dict[str, Any]:
        """Return the next answer that is owed; if it takes long, it is the last, and `late` is called. Raises Slow or Gone."""
        if not self.owed:
            raise Gone  # it is new: the pool was closed meanwhile
        number, seconds = self.calls - self.owed + 1, self._work.wall_seconds
        given_away = False
        try:
            answer = self.link.exchange(b"", min(LATE_SECONDS, seconds))
        except Slow:
            late()
            given_away = True
            answer = self.link.exchange(b"", max(0.0, seconds - LATE_SECONDS))
        if answer.get("id") != number or "last" not in answer:
            raise Gone
        self.owed = 0 if answer.get("dropped") else self.owed - 1
        if given_away and self.owed:
            answer["last"] = True  # it has begun a call that is made elsewhere by now
        return answer

    def end(self, grace: float = _GRACE) -> int:
        """Kill the process with its group and have it reaped; returns its exit status as in subprocess.

        It has `grace` seconds to end by itself.
        """
        # It is looked at before it is reaped, so that its number still is its own when the group is killed.
        status = self._wait(grace)
        if status is None:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            status = self._wait(None)
        self.link.close()
        return -signal.SIGKILL if status is None else status

    def kill(self) -> None:
        """Send the end ahead, where several are ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _wait(self, seconds: float | None) -> int | None:
        """Return its exit status; None if it runs on after `seconds`, or if that is not known."""
        raise NotImplementedError


class Started(Process):
    """A process of its own, which loads the work itself."""

    def __init__(self, work: Work) -> None:
        errors = None if work.own_code else subprocess.DEVNULL
        self._popen = _starter(os.getpid()).submit(
            subprocess.Popen, worker_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env=worker_environment(), start_new_session=True,  # an interrupt is for the owner; and the group can be killed
        ).result()  # fmt: skip
        assert self._popen.stdin is not None and self._popen.stdout is not None  # noqa: PT018 - as they were asked for
        link = Link(os.dup(self._popen.stdin.fileno()), os.dup(self._popen.stdout.fileno()), work.max_answer)
        self._popen.stdin.close()
        self._popen.stdout.close()
        super().__init__(work, self._popen.pid, link)

    def _wait(self, seconds: float | None) -> int | None:
        if seconds is None:
            return self._popen.wait()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                self.kill()  # what it left of its group
                return self._popen.wait()
            time.sleep(0.001)
        return None


class Forked(Process):
    """A copy of a template, ready at once."""

    def __init__(self, work: Work, template: Template) -> None:
        """Raises Gone if the template has ended, TaskError if it refuses the work."""
        self._template = template
        requests, ours = os.pipe()
        answers, theirs = os.pipe()
        try:
            pid = template.fork(requests, theirs)
        except BaseException:
            os.close(ours)
            os.close(answers)
            raise
        finally:
            os.close(requests)
            os.close(theirs)
        super().__init__(work, pid, Link(ours, answers, work.max_answer))

    def start(self) -> None:
        if not self._ready:
            self.link.exchange(b"", START_SECONDS)
            self._ready = True

    def _wait(self, seconds: float | None) -> int | None:
        return self._template.status(self.pid, START_SECONDS if seconds is None else seconds)


class Template:
    """A process that has loaded the work, and makes copies of itself. Used by several threads."""

    def __init__(self, work: Work) -> None:
        self._work, self._lock, self._ready = work, threading.Lock(), False
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [*worker_command(), "template"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=worker_environment(),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._socket = ours
        self._buffer = b""
        ours.settimeout(START_SECONDS)

    def start(self) -> None:
        """Wait until the work is loaded. Raises Gone, or TaskError if it refuses."""
        with self._lock:
            if not self._ready:
                self._send(wire.dumps(self._work.hello))
                _refused(self._receive())
                self._ready = True

    def fork(self, requests: int, answers: int) -> int:
        """Make a copy, which reads requests there and answers there; returns its number. Raises as `start` does."""
        self.start()
        with self._lock:
            self._send(wire.dumps({"op": "fork"}), [requests, answers])
            answer = self._receive()
            if "error" in answer:
                raise TaskError(
                    f"a worker process cannot be started: {answer['error']}",
                    where=self._work.where,
                    fix="free memory, or end other processes",
                )
            return int(answer["pid"])

    def status(self, pid: int, seconds: float) -> int | None:
        """Return how a copy ended, as in subprocess; None if it runs on after `seconds` or the template is gone."""
        with self._lock:
            try:
                self._send(wire.dumps({"op": "status", "pid": pid, "seconds": seconds}))
                status = self._receive()["status"]
            except Gone:
                return None
            return None if status is None else int(status)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._socket.close()

    def _send(self, line: bytes, descriptors: list[int] | None = None) -> None:
        try:
            if descriptors:
                socket.send_fds(self._socket, [line], descriptors)
            else:
                self._socket.sendall(line)
        except OSError as error:
            raise Gone from error

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            try:
                data = self._socket.recv(65536)
            except OSError as error:
                raise Gone from error
            if not data:
                raise Gone
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\n")
        return _answer(first)


def worker_command() -> list[str]:
    return [sys.executable, "-P", "-m", "lockstep.workers.worker"]


def worker_environment() -> dict[str, str]:
    """Return this process's environment, with what makes verdicts repeat and keeps the number of threads low."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return own_environment(PYTHONHASHSEED="0", **threads)


def own_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment and module path, with these changes."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
    return {**os.environ, "PYTHONPATH": path, **changes}


def _answer(line: bytes) -> dict[str, Any]:
    try:
        answer = wire.loads(line)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Gone from error
    if not isinstance(answer, dict):
        raise Gone
    return answer


def _refused(answer: dict[str, Any]) -> None:
    if "refused" in answer:
        what, where, fix = answer["refused"]
        raise TaskError(what, where=where, fix=fix)
