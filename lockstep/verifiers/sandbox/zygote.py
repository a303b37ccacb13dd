"""The zygote: an isolated Python process that forks one process for each program, so that Python starts only once.

It never sees a program or a test: those go through pipes that are opened for one process each. Descriptor 0 is a socket, whose
other end asks for processes (see host.py); when it closes, this process ends.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import platform
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lockstep.verifiers.sandbox import child, isolation, seccomp

CALLS, SCRIPT, TESTS = "calls", "script", "tests"
UP = b'{"up": true}\n'
"""Said by each process when it has given up all that it does not need, before it reads its program."""
SYSTEM_CALLS, LIMITS = "a filter of system calls", "limits"
_PRELOADED = (
    "array bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math operator "
    "random re statistics string time typing"
)
Serve = Callable[[io.BufferedReader, io.BufferedWriter], NoReturn]
PREPARE_SECONDS = 50
"""A zygote that takes longer to prepare a role ends."""


def main(root: str, paths: Sequence[str] = (), module: str = "") -> None:
    """Fork processes until the control socket closes.

    `root`: the folder on the module path from which this came; programs must not find it there. `module`: loaded here once,
    with `paths` on the module path; its `load` gives a function that gives what serves a role which is none of those above.
    """
    control = socket.socket(fileno=os.dup(0))
    for name in _PRELOADED.split():
        __import__(name)
    sys.path += paths
    prepare = _prepared(importlib.import_module(module).load()) if module else None
    sys.path.remove(root)
    hello = json.loads(control.recv(1 << 16))
    limits, memory = isolation.Limits(**hello["limits"]), isolation.held()
    proc = os.open("/proc", os.O_RDONLY)  # for each program's parent; no program has it
    done, missing = isolation.enter(hello["apart"])
    filter = None
    if seccomp.supported() and hello["filter"]:
        filter = seccomp.program(platform.machine())
        done.append(SYSTEM_CALLS)
    else:
        missing.append(f"{SYSTEM_CALLS}: none for {platform.machine()}")
    done.append(LIMITS)
    control.send(json.dumps({"in_force": done, "missing": missing}).encode())
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 8)
        if not data:
            return
        what = "prepare"
        try:
            serve = prepare(data.decode()) if prepare else None
            what = "fork"
            forked = os.fork()
        except Exception as error:
            os.write(descriptors[0], json.dumps({"error": f"{what}: {error}"[:1000]}).encode() + b"\n")
            forked = -1
        if forked == 0:
            control.close()
            os.close(0)
            os.open(os.devnull, os.O_RDWR)
            _watch(data.decode(), descriptors, done, limits, memory, filter, serve, proc)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(
    role: str,
    descriptors: Sequence[int],
    done: Sequence[str],
    limits: isolation.Limits,
    memory: int,
    filter: bytes | None,
    serve: Serve | None,
    proc: int,
) -> NoReturn:
    """Run one program, and say how it ended on the first descriptor; if the other end is shut, kill it first."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    report = socket.socket(fileno=descriptors[0])
    folder, said = "", {}
    try:
        uid = isolation.own_uid()
        if not isolation.before_fork(done, limits):
            folder = tempfile.mkdtemp(prefix=f"lockstep-sandbox-{os.getppid()}-")
            if uid is not None:
                os.chown(folder, uid, uid)
        pid = os.fork()
        if pid == 0:
            _program(role, descriptors[1:], folder or isolation.work(), limits, memory, uid, filter, serve)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        report.send(json.dumps({"pid": pid}).encode() + b"\n")
        said = _wait(pid, report, proc)
    except OSError as error:
        said = {"error": f"{error.strerror} ({error})"}
    finally:
        with suppress(OSError):
            report.send(json.dumps(said).encode() + b"\n")
        if folder:
            with suppress(RecursionError):  # of folders nested too deeply: how the program ended is said already
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _wait(pid: int, report: socket.socket, proc: int) -> dict[str, Any]:
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(report, select.POLLIN)
    poll.poll()
    waited = _waited(pid, proc)
    for kill in (os.killpg, os.kill):  # without a process table of its own, its group is what can be killed
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime, "waited": waited}


def _waited(pid: int, proc: int) -> float:
    """Seconds for which the thread that waited longest waited for a processor; 0 where the kernel does not count them."""
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        threads = os.open(f"{pid}/task", os.O_RDONLY, dir_fd=proc)
        for thread in os.listdir(threads):  # noqa: PTH208
            with open(os.open(f"{thread}/schedstat", os.O_RDONLY, dir_fd=threads)) as file:  # noqa: PTH123
                waited = max(waited, int(file.read().split()[1]))
    return waited / 1e9


def _program(
    role: str,
    descriptors: Sequence[int],
    folder: str,
    limits: isolation.Limits,
    memory: int,
    uid: int | None,
    filter: bytes | None,
    serve: Serve | None,
) -> NoReturn:
    """Become what runs the program."""
    try:
        os.chdir(folder)
        requests, answers, *others = descriptors
        nothing = os.open(os.devnull, os.O_RDWR)
        places = others if role == SCRIPT else [nothing, nothing]
        for place, descriptor in enumerate([*places, nothing]):
            os.dup2(descriptor, place)
        keep = [requests, answers, *(others if role == TESTS else [])]
        isolation.give_up(limits, memory, uid, filter, keep)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("lockstep", "__main__", "ctypes")]:
            del sys.modules[name]
        os.write(answers, UP)
        read, write = open(requests, "rb"), open(answers, "wb")  # noqa: PTH123, SIM115
        match role:
            case _ if serve is not None:
                serve(read, write)
            case "script":
                child.run_script(read, write)
            case "calls":
                child.serve_calls(read, write)
            case _:
                child.run_tests(read, write, open(others[0], "wb"), open(others[1], "rb"))  # noqa: PTH123, SIM115
    except (OSError, ValueError) as error:  # of the preparation: what is said after UP is the program's
        os.write(answers, json.dumps({"sandbox": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    finally:
        os._exit(99)


def _prepared(prepare: Callable[[str], Serve]) -> Callable[[str], Serve]:
    """Remember what serves each role, and end this process if that takes too long to prepare."""
    known: dict[str, Serve] = {}

    def serve_of(role: str) -> Serve:
        if role not in known:
            signal.alarm(PREPARE_SECONDS)
            try:
                known[role] = prepare(role)
            finally:
                signal.alarm(0)
        return known[role]

    return serve_of


def command(root: Path, paths: Sequence[str] = (), module: str = "") -> list[str]:
    """Starts a zygote from the package under `root`, without site packages or anything that the environment says.

    With a `module` (see main), `paths` are where it finds its packages, and the environment sets the order of Python's sets.
    """
    path, found = repr(str(root)), repr(list(paths))
    code = f"import sys; sys.path.insert(0, {path}); from {__name__} import main; main({path}, {found}, {module!r})"
    return [sys.executable, *(["-s", "-P"] if module else ["-I"]), "-S", "-c", code]
