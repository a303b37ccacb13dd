"""One worker process, as its owner has it: started on its own, or forked from a template that has loaded the work once."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.errors import TaskError
from lockstep.verifiers import wire

START_SECONDS = 120.0
"""Longest time that a process may take to load its work."""
MAX_ANSWER = 1 << 20
"""Longest answer in bytes."""
_GRACE = 0.05
"""Seconds in which a process that has closed its pipe ends by itself, so that how it ended says what happened."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a pool's processes do, and the limits of one call."""

    load: Mapping[str, Any]
    """Says what to load; see worker.py. Example: {"kind": "math"}"""
    where: str
    """Names the work in errors."""
    wall_seconds: float
    cpu_seconds: float | None = None
    """Processor time: unlike wall time it does not depend on what else the machine does."""
    memory: int | None = None
    """Bytes beyond what the process holds when it has loaded."""
    own_code: bool = False
    """The work is the user's: each process loads it by itself, as it may not survive a fork, and what it prints is shown."""

    @property
    def hello(self) -> dict[str, Any]:
        return {"load": self.load, "cpu_seconds": self.cpu_seconds, "memory": self.memory}


class Slow(Exception):
    """The process gave no answer in time."""


class Gone(Exception):
    """The process has ended, or what it says is no answer."""


class Link:
    """The owner's ends of a process's two pipes."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers, self._buffer = requests, answers, b""
        os.set_blocking(requests, False)

    def exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        """Send a line (none if it is empty) and wait for one. Raises Slow or Gone."""
        deadline, sent = time.monotonic() + seconds, 0
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if line:
            poll.register(self._requests, select.POLLOUT)
        while b"\n" not in self._buffer:
            events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not events:
                raise Slow
            if self._requests in events:
                try:
                    sent += os.write(self._requests, line[sent : sent + 65536])
                except BlockingIOError:
                    pass
                except BrokenPipeError as error:
                    raise Gone from error
                if sent == len(line):
                    poll.unregister(self._requests)
            if self._answers in events:
                data = os.read(self._answers, 65536)
                self._buffer += data
                if not data or len(self._buffer) > MAX_ANSWER:
                    raise Gone
        first, _, self._buffer = self._buffer.partition(b"\n")
        return _answer(first)

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._answers)


class Process:
    """A worker with its own process group. `end` must be called once."""

    def __init__(self, work: Work, pid: int, link: Link) -> None:
        self.pid, self.calls = pid, 0
        self._work, self._link, self._ready = work, link, False

    def start(self) -> None:
        """Wait until the work is loaded. Raises TaskError if the work refuses or does not come up, Gone if it ended."""
        if self._ready:
            return
        try:
            answer = self._link.exchange(wire.dumps(self._work.hello), START_SECONDS)
        except Slow as error:
            raise TaskError(
                f"it was not loaded in {START_SECONDS:g} s",
                where=self._work.where,
                fix="do less when the file is loaded",
            ) from error
        _refused(answer)
        self._ready = True

    def ask(self, call: object) -> dict[str, Any]:
        """The answer to one call. Raises Slow or Gone; TypeError if the call cannot be sent, and then nothing was."""
        line = wire.dumps({"id": self.calls + 1, "call": call})
        self.calls += 1
        answer = self._link.exchange(line, self._work.wall_seconds)
        if answer.get("id") != self.calls or "last" not in answer:
            raise Gone
        return answer

    def end(self) -> int:
        """Kill the process with its group and have it reaped; its exit status as in subprocess."""
        # It is looked at before it is reaped, so that its number still is its own when the group is killed.
        status = self._wait(_GRACE)
        if status is None:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            status = self._wait(None)
        self._link.close()
        return -signal.SIGKILL if status is None else status

    def kill(self) -> None:
        """Send the end ahead, where several are ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _wait(self, seconds: float | None) -> int | None:
        """Its exit status; None if it runs on after `seconds`, or if nobody knows."""
        raise NotImplementedError


class Started(Process):
    """A process of its own, which loads the work itself."""

    def __init__(self, work: Work) -> None:
        self._popen = subprocess.Popen(
            worker_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if work.own_code else subprocess.DEVNULL,
            env=worker_environment(),
            start_new_session=True,  # an interrupt is for the owner; and the whole group can be killed
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None  # noqa: PT018 - as they were asked for
        link = Link(os.dup(self._popen.stdin.fileno()), os.dup(self._popen.stdout.fileno()))
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
        super().__init__(work, pid, Link(ours, answers))

    def start(self) -> None:
        if not self._ready:
            self._link.exchange(b"", START_SECONDS)
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

    def fork(self, requests: int, answers: int) -> int:
        """The number of a new copy, which reads requests there and answers there. Raises Gone, or TaskError if it refuses."""
        with self._lock:
            if not self._ready:
                self._send(wire.dumps(self._work.hello))
                _refused(self._receive())
                self._ready = True
            self._send(wire.dumps({"op": "fork"}), [requests, answers])
            answer = self._receive()
            if "error" in answer:
                raise TaskError(
                    f"a process cannot be started: {answer['error']}",
                    where=self._work.where,
                    fix="free memory or processes",
                )
            return int(answer["pid"])

    def status(self, pid: int, seconds: float) -> int | None:
        """How a copy ended, as in subprocess; None if it runs on after `seconds` or the template is gone."""
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
    return [sys.executable, "-P", "-m", "lockstep.verifiers.worker"]


def worker_environment() -> dict[str, str]:
    """This process's environment, its module path, and what makes verdicts repeat and keeps the number of threads low."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # noqa: PTH109
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


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
