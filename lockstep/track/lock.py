"""Lets one process at a time write to a run directory: that process holds a file lock, and the file names it.

The kernel releases the lock (flock) when the process ends, for whatever reason. The file's content is for people, and for file
systems that grant a lock which they do not enforce. A forked child does not keep its parent's lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from lockstep.errors import RunDirectoryError, RunLockedError
from lockstep.track.files import open_plain, read_plain, storing
from lockstep.track.jsonl import parse_json

SAME_START_S = 2.0
"""Two readings of one process's start time may differ by this much (the clock may be set in between)."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lock. Example: Holder("node7", 4711, 1795231908.64, "2026-11-21T03:30:00Z")"""

    host: str
    pid: int
    started: float
    """When the process started, seconds since 1970; tells it from a later process with the same number."""
    since: str
    """When it took the lock, UTC."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def alive(self) -> bool | None:
        """True while the process runs, and is no zombie; None if it was on another host, where this one cannot look."""
        if self.host != socket.gethostname():
            return None
        try:
            found = psutil.Process(self.pid)
            if found.status() == psutil.STATUS_ZOMBIE:  # it has ended; its parent did not wait for it
                return False
            return abs(float(found.create_time()) - self.started) <= SAME_START_S
        except (psutil.NoSuchProcess, ValueError, OverflowError):  # the latter two for what is no process's number
            return False
        except psutil.AccessDenied:
            return True


class Lock:
    """Held from construction until `release`; `taken_from` is the holder that died without releasing it, if any.

    Raises RunLockedError naming the holder, and RunDirectoryError if the file cannot be locked at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor: int | None = open_plain(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunDirectoryError(f"the lock cannot be opened: {error.strerror}", where=str(path)) from error
        try:
            self.taken_from = self._take(self._descriptor)
        except BaseException:
            self._forget()
            raise
        _held.add(self)

    def _take(self, descriptor: int) -> Holder | None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(self.path, read_holder(self.path)) from None
        except OSError as error:
            what, fix = (
                f"the file system refuses to lock this file: {error.strerror}",
                "put runs_dir on a file system that supports locks",
            )
            raise RunDirectoryError(what, where=str(self.path), fix=fix) from error
        before = read_holder(self.path)
        if before is not None and before.alive:
            raise _locked(self.path, before)  # the file system granted a lock that it does not enforce
        since = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        me = Holder(socket.gethostname(), os.getpid(), psutil.Process().create_time(), since)
        with storing(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(me)).encode() + b"\n", 0)
            os.fsync(descriptor)
        return before

    def release(self) -> None:
        """Empty the file, so that the next holder knows that this one ended well, and let go. Twice is once."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self._forget()

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_holder(path: Path) -> Holder | None:
    """Return the holder that a lock file names; None if it is missing, empty, or was cut off while being written."""
    try:
        facts = parse_json(read_plain(path))
        return Holder(str(facts["host"]), int(facts["pid"]), float(facts["started"]), str(facts["since"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _locked(path: Path, holder: Holder | None) -> RunLockedError:
    if holder is None:
        fix = "wait until the other process ends, or end it"
        return RunLockedError("another process is writing to this run directory", where=str(path.parent), fix=fix)
    if holder.alive is False:
        what = f"locked by {holder}; that process is gone, but a process that it started still holds the lock"
        fix = f"end the children of process {holder.pid}, then try again"
        return RunLockedError(what, where=str(path.parent), fix=fix)
    what = f"another process is writing to this run directory: {holder}"
    return RunLockedError(what, where=str(path.parent), fix="wait until that process ends, or end it")


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Let go of all locks: a forked worker that outlives a killed trainer must not keep the run locked."""
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_drop_in_child)
