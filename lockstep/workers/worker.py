"""A process that does one kind of work, call by call, within limits: python -m lockstep.workers.worker.

It reads lines of JSON from its standard input and answers each with one line (see wire.py). The first line says what to load.
What it prints goes to standard error. It is never trusted to end by itself: its owner (pool.py) kills it, the kernel ends a
call that takes too much processor time, and a thread ends it when its owner is gone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from lockstep.errors import LockstepError
from lockstep.user_code import describe
from lockstep.workers import stacks, wire

Handler = Callable[[Any], object]

GROWTH = 256 * 2**20
"""A process that holds so much more than after loading is replaced: a call's memory is not charged to a later one."""
_PR_SET_PDEATHSIG = 1
STARTS_PROCESSES = (
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.exec",
    "os.system",
    "subprocess.Popen",
    "pty.spawn",
)


class StartsProcessError(Exception):
    """The work tried to start a process."""


class Guard:
    """Refuses new processes while a call runs, and remembers that one was tried."""

    def __init__(self) -> None:
        self.active = False
        self.tried = ""
        self._had_child = _has_child()
        """The user's file may start helpers of its own when it is loaded."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, _: tuple[object, ...]) -> None:
        if self.active and event in STARTS_PROCESSES:
            self.tried = event
            raise StartsProcessError(f"the code tried to start a process ({event}), which is not allowed here")

    def child(self) -> str:
        """Return the fault of a call that left a child behind, however it came to be; "" if it has not."""
        return "" if self._had_child or not _has_child() else "it left one behind"


def _has_child() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it: no thread of ours ends work that keeps Python's lock."""
    with suppress(AttributeError):  # of Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serve calls until standard input ends, or with the argument `template`, make copies that do."""
    if sys.argv[1:] == ["template"]:
        _template(socket.socket(fileno=os.dup(0)))
        return
    _end_with_parent()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the work prints must not mix with the answers
    threading.Thread(target=_end_with_owner, args=(requests.fileno(), os.getppid()), daemon=True).start()
    settings = wire.loads(requests.readline())
    if settings["file"]:
        stacks.write_when_asked()
    if (handler := _load(settings, answers)) is not None:
        serve(handler, settings, requests, answers)


def _template(control: socket.socket) -> None:
    """Load once, then make a copy for each two descriptors that arrive, and say how copies ended. Has one thread: it forks."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    lines = control.makefile("wb")
    first = b""
    while not first.endswith(b"\n"):
        data = control.recv(1 << 16)
        if not data:
            return
        first += data
    settings = wire.loads(first)
    if (handler := _load(settings, lines)) is None:
        return
    gc.freeze()  # what is loaded stays shared with the copies
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not data:
            return
        message = wire.loads(data)
        if message["op"] == "status":
            _send(lines, {"status": _status(message["pid"], message["seconds"])})
            continue
        try:
            pid = os.fork()
        except OSError as error:
            _send(lines, {"error": str(error)})
            pid = -1
        if pid == 0:
            lines.close()  # a socket stays open as long as a file of it is: then the owner would not see the template end
            control.close()
            _copy(handler, settings, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            _send(lines, {"pid": pid})


def _copy(handler: Handler, settings: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Serve one owner's calls in a copy of the template, then end without running anything of the template's."""
    try:
        os.setsid()
        _end_with_parent()
        requests, answers = os.fdopen(descriptors[0], "rb"), os.fdopen(descriptors[1], "wb")
        threading.Thread(target=_end_with_owner, args=(descriptors[0], os.getppid()), daemon=True).start()
        _send(answers, {"ready": os.getpid()})
        serve(handler, settings, requests, answers)
    finally:
        os._exit(0)


def _status(pid: int, seconds: float) -> int | None:
    """Return how a copy ended, as in subprocess; None if it has not after `seconds`, or is none of this process's."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)


def serve(handler: Handler, settings: dict[str, Any], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer each request, each within the limits of the settings (see process.Work)."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    base, guard, process = _held(statm), Guard(), os.getpid()
    memory, stateful = settings["memory"], settings["stateful"]
    path = Path(settings["file"]).expanduser() if settings["file"] else None
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (base + memory, base + memory))
    slow = 0
    for line in requests:
        request = wire.loads(line)
        if request["batch"] == slow:
            continue
        _limit_cpu(settings["cpu_seconds"])
        guard.active, guard.tried, start = not stateful, "", time.perf_counter()
        answer: dict[str, Any]
        try:
            answer = {"ok": handler(request["call"])}
        except MemoryError as error:
            answer = {"limit": "memory", "error": describe(error, path)}
        except (Exception, SystemExit) as error:
            answer = {"error": describe(error, path)}
        guard.active = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        if os.getpid() != process:
            os._exit(0)  # a copy of this process, made by the work: it has no owner
        if forked := not stateful and (guard.tried or guard.child()):
            answer = {"error": answer.get("error") or f"it started a process ({forked})"}
        done = not stateful and (bool(forked) or "limit" in answer or _held(statm) - base > GROWTH)
        if dropped := time.perf_counter() - start > settings["slow_seconds"]:  # other processes may be idle
            slow = request["batch"]
        _send(answers, answer | {"id": request["id"], "last": done, "dropped": dropped})
        if done:
            os._exit(0)


def _load(settings: dict[str, Any], answers: BinaryIO) -> Handler | None:
    """Return what answers calls, and say that it is ready; None if it refuses. Each process imports only what it needs."""
    try:
        handler: Handler = importlib.import_module(settings["module"]).load(**settings["arguments"])
    except LockstepError as error:
        _send(answers, {"refused": [error.what, error.where, error.fix]})
        return None
    _send(answers, {"ready": os.getpid()})
    return handler


def _limit_cpu(seconds: float | None) -> None:
    """End this process when it has used so much more processor time: by a signal that nothing here handles."""
    if seconds is None:
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    whole = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1  # in case the work stops the timer
    resource.setrlimit(resource.RLIMIT_CPU, (whole, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _held(statm: int) -> int:
    """Bytes of address space of this process. `statm`: its file of this name, open."""
    return int(os.pread(statm, 64, 0).split()[0]) * resource.getpagesize()


def _end_with_owner(requests: int, owner: int) -> None:
    poll = select.poll()
    poll.register(requests, 0)  # the other end closing is always reported
    while not poll.poll(1000) and os.getppid() == owner:
        pass
    if os.getpgrp() == os.getpid():  # as its owner starts it
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    try:
        line = wire.dumps(answer)
    except (TypeError, MemoryError) as error:
        line = wire.dumps({"id": answer.get("id"), "last": True, "error": f"its result cannot be sent: {error}"})
    answers.write(line)
    answers.flush()


if __name__ == "__main__":
    main()
