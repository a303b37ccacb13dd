"""The watchdog: ends a run if a phase makes no progress for much longer than it took before, and writes all threads' stacks."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which

import psutil

from lockstep.config.health import Stall
from lockstep.errors import LockstepError, Stalled
from lockstep.run import guard
from lockstep.track.files import open_plain

KEPT = 20
"""Durations of a phase that its limit follows from."""
TICK_S = 1.0
PATIENCE_S = 60.0
"""Longest time to write the stacks: the disk itself may be what hangs."""
ROOM_S = 5.0
"""Time between the stacks of a process that native code holds, and its end."""
PY_SPY_S = 20.0
BETWEEN = "after "
"""Prefix of the name of the time between two phases."""


class Watchdog:
    """Watches the phases of a run from a thread; a context manager. Nothing is watched outside of it, nor if it is off.

    `tell` gets the message of a phase that stands still, before the process ends.
    """

    def __init__(self, settings: Stall, run: Path, tell: Callable[[str], None]) -> None:
        self._settings, self._run, self._tell = settings, run, tell
        self._seconds: dict[str, deque[float]] = {}
        self._phase, self._beat, self._longest = f"{BETWEEN}the start", time.monotonic(), 0.0
        self._warned = False
        self._over = threading.Event()
        self._guard: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._turn(self._phase)
        if self._settings.tier != "off":
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(TICK_S)
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch a block as a phase of its own; the time until the next one is a phase, too."""
        outer = self._phase
        self._turn(name)
        try:
            yield
        finally:
            self._turn(outer if not outer.startswith(BETWEEN) else f"{BETWEEN}{name}")

    def beat(self) -> None:
        """Report progress within a phase: its time starts again."""
        now = time.monotonic()
        self._longest, self._beat = max(self._longest, now - self._beat), now

    @property
    def limit(self) -> float:
        """Seconds that the present phase may take, or go without progress."""
        past, settings = self._seconds.get(self._phase), self._settings
        return max(settings.least_s, settings.times * max(past)) if past else settings.first_s

    def _turn(self, name: str) -> None:
        """End the present phase and begin another."""
        now = time.monotonic()
        self._seconds.setdefault(self._phase, deque(maxlen=KEPT)).append(max(self._longest, now - self._beat))
        self._phase, self._beat, self._longest, self._warned = name, now, 0.0, False
        self._arm()

    @property
    def allowance(self) -> float:
        """Seconds for which native code may hold the interpreter, so that the thread cannot run."""
        return 2 * self.limit + PATIENCE_S

    def _arm(self) -> None:
        """Start the allowance again. At its end faulthandler writes the stacks, and then the guard kills this process."""
        if self._settings.tier != "stop" or not self._thread.is_alive():
            return
        seconds, process = self.allowance, self._guard
        # Without a guard it ends the run itself.
        faulthandler.dump_traceback_later(seconds, exit=process is None, file=2)
        if process is not None and process.stdin is not None:
            line = f"{seconds + ROOM_S:.0f}\n".encode()
            with suppress(OSError, ValueError):  # it is gone, or it is stopped and its pipe is full
                os.write(process.stdin.fileno(), line)

    def _watch(self) -> None:
        if self._settings.tier == "stop":
            with suppress(OSError):
                self._guard = _started(self._run)
        try:
            self._arm()
            self._look()
        finally:
            if self._guard is not None:
                self._guard.kill()
                self._guard.communicate()

    def _look(self) -> None:
        before = time.monotonic()
        while not self._over.wait(min(TICK_S, self.limit / 4)):
            now = time.monotonic()
            if now - before > 5 * TICK_S:  # the process was stopped, or the machine slept: that is no time of the phase
                self._beat += now - before
            before = now
            still = now - self._beat
            if still <= self.limit:
                self._arm()
            elif not self._warned:
                self._warned = True
                self._report(still)

    def _report(self, still: float) -> None:
        """Write the stacks, tell, and end the process unless the tier is warn."""
        past = self._seconds.get(self._phase, ())
        usual = f"the longest of {len(past)} before took {max(past):.1f} s" if past else "it runs for the first time"
        error = Stalled(
            f"the run stands still: phase {self._phase} has made no progress for {still:.0f} s; its limit is {self.limit:.0f} s "
            f"({usual})",
            where=str(self._run),
            fix="stall.txt there has the stacks of all threads and child processes; resume with `lockstep train --resume "
            f"{self._run}`. If such times are normal, raise health.stall.least_s or set health.stall=warn",
        )
        writer = threading.Thread(target=self._write, args=(error,), daemon=True)
        writer.start()
        writer.join(PATIENCE_S)
        if self._settings.tier == "stop" and not self._over.is_set():
            end(error)

    def _write(self, error: LockstepError) -> None:
        with suppress(LockstepError, OSError):
            write_stacks(self._run / "stall.txt", str(error))
        with suppress(LockstepError, OSError):
            self._tell(str(error))


def _started(run: Path) -> subprocess.Popen[bytes]:
    """Start the guard of this process. Raises OSError."""
    command = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(os.getpid()), str(run)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/")
    if process.stdin is not None:
        os.set_blocking(process.stdin.fileno(), False)
    return process


def end(error: LockstepError) -> None:
    """Kill the child processes and end this one with the error's exit code: its main thread may never run again."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    with suppress(OSError, ValueError):
        print(f"lockstep: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def write_stacks(path: Path, head: str) -> None:
    """Write the stacks of all threads of this process, and what can be told of its children, into a file."""
    descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        print(f"{head}\n\nthreads of process {os.getpid()}, the most recent call first", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        for child in psutil.Process().children(recursive=True):
            print(f"\n{_described(child)}", file=file, flush=True)


def _described(child: psutil.Process) -> str:
    """Return state, command and stacks of a child process; py-spy reads those of Python, stopped ones as well."""
    try:
        times = child.cpu_times()
        command = " ".join(child.cmdline())[:500]
        head = f"child process {child.pid}, {child.status()}, {times.user + times.system:.1f} s of CPU: {command}"
    except psutil.Error as error:
        return f"child process {child.pid}: {error}"
    waits = ""
    with suppress(OSError):
        waits = f"\nwaits in the kernel at {Path(f'/proc/{child.pid}/wchan').read_text() or '?'}"
    return f"{head}{waits}\n{_stacks(child.pid)}"


def _stacks(pid: int) -> str:
    spy = which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if spy is None:
        return "its stacks need py-spy: pip install 'lockstep-rl[stacks]'"
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy: {error}"
    return found.stdout or f"py-spy: {found.stderr.strip()[:500]}"
