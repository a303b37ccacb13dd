"""The trusted side of the sandbox: asks the zygote (zygote.py) for processes, talks to them within a deadline, and ends them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lockstep
from lockstep.verifiers.sandbox import plain, zygote
from lockstep.verifiers.sandbox.isolation import Limits

START_SECONDS = 60.0
_ROOT = Path(lockstep.__file__).parents[1]
_REPEATABLE = {
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""For a zygote that loads packages: verdicts that repeat, and no threads, with which it could not leave its namespaces."""


class SandboxError(Exception):
    """The sandbox does not work, through no fault of the program."""


class ZygoteGone(SandboxError):
    """The process that forks the others was ended from outside."""


class TimeOut(Exception):
    """The deadline passed."""


class Flood(Exception):
    """More output than allowed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program's process."""

    status: int
    """Exit status as in subprocess."""
    cpu_seconds: float
    waited_seconds: float = 0.0
    """Time for which it waited for a processor."""


class Sandbox:
    """Forks processes for programs. `close` ends it; so does the end of this process."""

    def __init__(
        self, limits: Limits, *, apart: bool = True, filter: bool = True, paths: Sequence[str] = (), module: str = ""
    ) -> None:
        """Raises SandboxError. Without `apart` no namespaces are made, without `filter` no system call is denied.

        `module` is loaded from `paths` before that and serves the roles that it knows (see zygote.main).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                zygote.command(_ROOT, paths, module),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_REPEATABLE if module else {},
                cwd="/",
            )
        self._control = ours
        self.pid = self._popen.pid
        ours.settimeout(START_SECONDS * (3 if module else 1))
        reason = "the sandbox process ended"
        try:
            ours.send(json.dumps({"apart": apart, "filter": filter, "limits": asdict(limits)}).encode())
            ready = ours.recv(1 << 16)
        except OSError as error:
            ready = b""
            reason = str(error)
        if not ready:
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(1)
            if self._popen.returncode == -signal.SIGKILL:
                self.close()
                raise ZygoteGone("the sandbox process was killed while it started; is the memory full?")
            self._popen.kill()
            said = (self._popen.communicate()[1] or b"").decode("utf-8", "replace").strip().splitlines()
            raise SandboxError(said[-1] if said else reason)
        answer = json.loads(ready)
        self.in_force: tuple[str, ...] = tuple(answer["in_force"])
        self.missing: tuple[str, ...] = tuple(answer["missing"])
        """Each with the reason."""

    def spawn(self, role: str, theirs: Sequence[int], deadline: float) -> Run:
        """Start a process in the role; `theirs` are more descriptors for it. Raises SandboxError."""
        with ExitStack() as opened:
            ours, report = socket.socketpair()
            opened.callback(report.close)
            request_read, request_write = os.pipe()
            answer_read, answer_write = os.pipe()
            for descriptor in (request_read, answer_write):
                opened.callback(os.close, descriptor)
            run = Run(ours, request_write, answer_read, deadline)
            try:
                socket.send_fds(self._control, [role.encode()], [report.fileno(), request_read, answer_write, *theirs])
            except OSError as error:
                run.end()
                raise ZygoteGone(f"the sandbox has ended: {error}") from error
        return run

    def close(self) -> None:
        self._control.close()
        self._popen.kill()
        self._popen.wait()
        if self._popen.stderr is not None:
            self._popen.stderr.close()


class Run:
    """One process. A context: leaving it kills the process, if it still runs, and waits until it is gone."""

    def __init__(self, report: socket.socket, requests: int, answers: int, deadline: float) -> None:
        self._report, self._requests, self._answers = report, requests, answers
        self.deadline = deadline
        self.pid = 0
        self.ended: Ended | None = None
        self._buffer, self._told = b"", b""
        os.set_blocking(requests, False)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self) -> None:
        """Wait until it is ready for its program. Raises SandboxError, TimeOut."""
        try:
            said = self._line(b"", 1 << 16)
        except EOFError:
            said = b""
        self._hear()
        if said != zygote.UP:
            if not said and not self._told:
                raise ZygoteGone("a sandbox was lost while it was prepared")
            why = said.decode("utf-8", "replace").strip() or self._told.decode()
            raise SandboxError(f"a sandbox could not be prepared: {why}")

    def ask(self, message: Mapping[str, Any], limit: int = plain.MAX_LINE) -> dict[str, Any]:
        """Return its answer. Raises EOFError if it ended, TimeOut, Flood for more than `limit` bytes, NotPlainError."""
        return plain.read(self._line(json.dumps(message).encode() + b"\n", limit))

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send without waiting for an answer. Raises EOFError if it ended, TimeOut."""
        pump(self._requests, json.dumps(message).encode() + b"\n", None, self.deadline, 0)

    def wait(self) -> None:
        """Wait until it ends by itself. Raises TimeOut."""
        while self.ended is None:
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            if not poll.poll(max(0.0, self.deadline - time.monotonic()) * 1000):
                raise TimeOut
            if not self._hear():
                return

    def by_itself(self) -> Ended | None:
        """Return how it ended, if it did by itself; None if it runs on for some seconds. Raises ZygoteGone if it was lost."""
        self.deadline = time.monotonic() + 3.0
        try:
            self.wait()
        except TimeOut:
            return None
        if self.ended is None:
            raise ZygoteGone("its process was lost")
        return self.ended

    def hand_over(self) -> tuple[int, int]:
        """Return the ends of its request and answer pipes, for another process to use from now on."""
        os.set_blocking(self._requests, True)
        return self._requests, self._answers

    def end(self) -> Ended | None:
        """Kill it, if it runs, and wait. Returns how it ended; None if that is not known."""
        if self._requests < 0:
            return self.ended
        for descriptor in (self._requests, self._answers):
            os.close(descriptor)
        self._requests = self._answers = -1
        with suppress(OSError):
            self._report.shutdown(socket.SHUT_WR)
        while self._hear():
            pass
        self._report.close()
        return self.ended

    def starved(self, seconds: float) -> bool:
        """Say if it waited for a processor for most of the `seconds` that it had: then its time is not its own fault."""
        waited = 0.0
        with suppress(OSError, ValueError, IndexError):
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                waited = max(waited, int((thread / "schedstat").read_text().split()[1]) / 1e9)
        return waited > seconds / 2

    def _line(self, line: bytes, limit: int) -> bytes:
        parts, size = [self._buffer], len(self._buffer)
        while b"\n" not in parts[-1]:
            data = pump(self._requests, line, self._answers, self.deadline, limit - size)
            line = b""
            if not data:
                raise EOFError
            parts.append(data)
            size += len(data)
        first, _, self._buffer = b"".join(parts).partition(b"\n")
        return first + b"\n"

    def _hear(self) -> bool:
        """Read the next report of its parent; False at the end."""
        self._report.settimeout(START_SECONDS)
        try:
            data = self._report.recv(1 << 12)
        except OSError:
            data = b""
        for line in data.splitlines():
            said = json.loads(line)
            self.pid = said.get("pid", self.pid)
            if "status" in said:
                self.ended = Ended(said["status"], said["cpu"], said["waited"])
            elif "error" in said:
                self._told = line
        return bool(data)


def pump(to: int, data: bytes, back: int | None, deadline: float, limit: int, owned: set[int] | None = None) -> bytes:
    """Write `data` and read what comes back: the first that comes; with `owned`, all until its end.

    `owned`: descriptors of the caller's; `to` is closed when all is written, and then leaves them. Raises TimeOut, or Flood for
    more than `limit` bytes. A reader that is gone ends the writing; without `back` that is an EOFError.
    """
    poll, read, sent = select.poll(), b"", 0
    if back is not None:
        poll.register(back, select.POLLIN)
    if data:
        poll.register(to, select.POLLOUT)
    elif owned is not None:
        _close(to, owned)
    while sent < len(data) or back is not None:
        events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not events:
            raise TimeOut
        if to in events and sent < len(data):
            sent = _write(to, data, sent)
            if sent < 0 and back is None:
                raise EOFError
            if not 0 <= sent < len(data):
                sent = len(data)
                poll.unregister(to)
                if owned is not None:
                    _close(to, owned)
        if back in events and back is not None:
            part = os.read(back, 65536)
            read += part
            if len(read) > limit:
                raise Flood
            if not part or owned is None:
                return read
    return read


def _write(to: int, data: bytes, sent: int) -> int:
    """Write some more, and return how much is sent now; -1 if the reader is gone."""
    try:
        return sent + os.write(to, data[sent : sent + 65536])
    except BlockingIOError:
        return sent
    except BrokenPipeError:
        return -1


def _close(descriptor: int, owned: set[int]) -> None:
    owned.discard(descriptor)
    os.close(descriptor)
