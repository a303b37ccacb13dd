"""Processes that do one kind of work within limits, and are killed and replaced when they exceed them.

Each call has a process to itself, so what one call does to its process no other call sees. A process that dies for no fault
of its call (someone killed it) is replaced and the call made again. Nothing is shared that a death could break.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lockstep.errors import TaskError
from lockstep.workers.process import START_SECONDS, Forked, Gone, Process, Slow, Started, Template
from lockstep.workers.process import Work as Work
from lockstep.workers.stacks import line_of

ATTEMPTS = 8
"""A call whose process was killed from outside is made so often; one whose process ended by itself, twice."""
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Answered:
    """The work returned this."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The work raised, or did what it must not. Example: Failed("ValueError: odd (grader.py:3)")"""

    error: str


@dataclass(frozen=True, slots=True)
class Exceeded:
    """The work met a limit: "cpu", "memory" or "time"."""

    limit: str
    error: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended during the call, each time that it was made."""

    error: str


Outcome: TypeAlias = Answered | Failed | Exceeded | Died


@dataclass(slots=True)
class _Running:
    """Processes that must be ended."""

    owner: int
    processes: dict[int, Process] = field(default_factory=dict)
    template: Template | None = None

    def end(self) -> None:
        if os.getpid() != self.owner:
            return  # a copy of the owner, made by fork: the processes are not its own
        ending = [self.processes.pop(slot) for slot in list(self.processes)]
        for process in ending:
            process.kill()
        for process in ending:
            process.end()
        if self.template is not None:
            self.template.end()
            self.template = None


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@contextmanager
def ended_after() -> Iterator[None]:
    """End the processes of all pools that the block makes: they would live as long as anything refers to a pool."""
    before = weakref.WeakSet(_pools)
    try:
        yield
    finally:
        for pool in {*_pools} - {*before}:
            pool.close()


class WorkerPool:
    """At most `size` processes, started when first needed. `call` may be used by several threads at once."""

    def __init__(self, work: Work, size: int) -> None:
        self.work = work
        self.size = size
        self.replaced = 0
        """Processes that died or were killed so far."""
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in reversed(range(size)):
            self._free.put(slot)
        self._running = _Running(os.getpid())
        self._lock = threading.Lock()
        self._closer = weakref.finalize(self, _Running.end, self._running)
        _pools.add(self)

    @property
    def pids(self) -> tuple[int, ...]:
        """Numbers of the processes that run now."""
        return tuple(process.pid for process in list(self._running.processes.values()))

    def start(self) -> None:
        """Start one process and load the work. Raises TaskError if it cannot be loaded."""
        slot = self._free.get()
        try:
            self._process(slot)
        finally:
            self._free.put(slot)

    def call(self, call: object) -> Outcome:
        """Return the outcome of `call`, which has a process to itself meanwhile. Raises TaskError if none can be started."""
        (outcome,) = self.call_many((call,))
        return outcome

    def call_many(
        self, calls: Sequence[object], late: Callable[[], None] = lambda: None
    ) -> Generator[Outcome, None, None]:
        """Yield the outcomes of the first of these calls, at least one, in order. They are sent to one process together, which
        makes one after the other, each within its limits: their outcomes are those of `call`.

        Calls after one that takes long or costs its process are not made. `late` is called, once or more, when the next outcome
        is the last and has to be waited for: the others can be made elsewhere meanwhile. Raises as `call` does.
        """
        slot, sent = self._free.get(), calls
        try:
            for call in calls:
                own_deaths = 0
                for _ in range(ATTEMPTS):
                    outcome, by_itself = self._once(slot, sent, late)
                    own_deaths += by_itself
                    if not isinstance(outcome, Died) or own_deaths == 2:
                        break
                    late()
                    sent = (call,)
                yield outcome
                if not self._owed(slot):
                    return
                sent = ()
        finally:
            if self._owed(slot):
                self._replace(slot)
            self._free.put(slot)

    def close(self) -> None:
        """End all processes. The pool can be used again: it starts new ones."""
        self._running.end()

    def _owed(self, slot: int) -> int:
        process = self._running.processes.get(slot)
        return 0 if process is None else process.owed

    def _once(self, slot: int, calls: Sequence[object], late: Callable[[], None]) -> tuple[Outcome, bool]:
        """Send calls, if any; return the outcome of the first without one, and whether the process died by itself."""
        process = self._process(slot)
        answered = False
        try:
            if calls:
                process.send(calls)
            answer = process.answer(late)
            answered = not answer["last"]
        except TypeError as error:
            answered = True  # nothing was sent
            return Failed(str(error)), False
        except Slow:
            what, line = f"no answer in {self.work.wall_seconds:g} s", line_of(process.pid, self.work.file)
            return Exceeded("time", f"{what} ({line})" if line else what), False
        except Gone:
            answered = True
            return self._death(slot)
        finally:
            if not answered:
                self._replace(slot)
        if "ok" in answer:
            return Answered(answer["ok"]), False
        if "limit" in answer:
            return Exceeded(answer["limit"], answer["error"]), False
        return Failed(answer["error"]), False

    def _death(self, slot: int) -> tuple[Outcome, bool]:
        status = self._replace(slot)
        if status in (-signal.SIGPROF, -signal.SIGXCPU):
            return Exceeded("cpu", f"more than {self.work.cpu_seconds:g} s of processor time"), False
        ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        return Died(f"its process ended ({ended})"), -status not in _OUTSIDE

    def _process(self, slot: int) -> Process:
        """Return the slot's process, loaded. One that is killed from outside while it loads is started again."""
        deadline, own_deaths = time.monotonic() + START_SECONDS, 0
        while True:
            status = -int(signal.SIGKILL)
            try:
                process = self._running.processes.get(slot) or self._new(slot)
                process.start()
                return process
            except Gone:
                if slot in self._running.processes:
                    status = self._running.processes.pop(slot).end()
                own_deaths += -status not in _OUTSIDE
                if own_deaths == 2 or time.monotonic() > deadline:
                    raise TaskError(
                        f"the worker process ended while it loaded its code (status {status})",
                        where=self.work.where,
                        fix="read above what it printed, and check that memory is free",
                    ) from None
            except BaseException:
                if slot in self._running.processes:
                    self._running.processes.pop(slot).end()
                raise

    def _replace(self, slot: int) -> int:
        """End the slot's process; a next one that must load does so meanwhile. Returns how the old one ended."""
        self.replaced += 1
        status = self._running.processes.pop(slot).end()
        if self.work.own_code:
            self._new(slot)
        return status

    def _new(self, slot: int) -> Process:
        try:
            made = Started(self.work) if self.work.own_code else self._fork()
        except OSError as error:
            raise TaskError(
                f"a worker process cannot be started: {error}",
                where=self.work.where,
                fix="free memory, or end other processes",
            ) from error
        self._running.processes[slot] = made
        return made

    def _fork(self) -> Process:
        """Return a copy of the template. One that was killed is started again at the next call."""
        with self._lock:
            template = self._running.template = self._running.template or Template(self.work)
        try:
            return Forked(self.work, template)
        except (Gone, TaskError):
            with self._lock:
                if self._running.template is template:
                    self._running.template = None
                    template.end()
            raise
