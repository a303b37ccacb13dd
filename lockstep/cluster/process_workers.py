"""Workers as processes of this machine, one for each GPU or CPU process. All messages are plain values, through pipes."""

from __future__ import annotations

import secrets
import signal
import time
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from lockstep import errors
from lockstep.cluster import wire
from lockstep.cluster.child import ENDED, Child, Inbox, take
from lockstep.cluster.host import FAILED, OK, SAMPLER, TRAINER
from lockstep.cluster.messages import Failure, Lost, Place, Plain
from lockstep.cluster.plain import from_plain, to_plain
from lockstep.errors import ConfigError, EngineError, LockstepError, WorkerError, WorkerLost

LEAST_SECONDS = 120.0
"""Shortest deadline of a call whose duration is known."""
PATIENCE = 5.0
"""A call may take this many times as long as the longest of its kind so far."""
SETTLE_SECONDS = 2.0
"""After a first failure, time for the news of what caused it: a broken connection is heard of before the death behind it."""
STACK_SECONDS = 0.5
DEATH_SECONDS = 1.0
"""A process whose pipe has closed has this long to end by itself, so that how it ended is known."""
PIDS = "pids.txt"
CHANNEL = "channel"
"""Start of the names of files by which processes meet to send weights."""


_UNDER_WAY = object()


@dataclass(slots=True)
class _Call:
    """A call of a worker's method."""

    method: str
    began: float
    """When it was its turn."""
    result: Any = _UNDER_WAY
    """Value that was returned, or a Failure."""


class ProcessWorkers:
    """Implements Workers: `size` processes that train, then `samplers` that only sample and may be replaced."""

    def __init__(
        self,
        size: int,
        folder: Path,
        *,
        gpu: bool,
        timeout: float,
        threads: int,
        samplers: int = 0,
        spare: int = 0,
        trainer: str = TRAINER,
    ) -> None:
        """Start the processes. `spare`: times that a lost sampler may be replaced; `trainer`: class of the first ones."""
        self.timeout, self._folder, self._trainers, self._spare = timeout, folder, size, spare
        self._threads, self._trainer = threads, trainer
        self.again = "continue with lockstep train --resume"
        self.size, self.gpu = (size := size + samplers), gpu
        self._calls: list[deque[_Call]] = [deque() for _ in range(size)]
        """Calls by rank whose results were not taken yet, the oldest first."""
        self._longest: dict[str, float] = {}
        self.spent: defaultdict[tuple[int, str], float] = defaultdict(float)
        """Seconds of each rank and method."""
        self._dead: dict[int, Failure] = {}
        self._inbox: Inbox = SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        self._rendezvous = folder / f"rendezvous_{secrets.token_hex(8)}"
        self._place = Place(0, self._trainers, str(folder), str(self._rendezvous), threads, samplers)
        self._children = [self._started(rank) for rank in range(size)]
        self._write_pids()

    def _started(self, rank: int) -> Child:
        child = take(self._threads)
        child.connect(self._inbox)
        worker = self._trainer if rank < self._trainers else SAMPLER
        child.send(wire.dumps([to_plain(Place, replace(self._place, rank=rank)), worker]))
        return child

    def _write_pids(self) -> None:
        pids = "".join(f"rank {rank}: {child.pid}\n" for rank, child in enumerate(self._children))
        (self._folder / PIDS).write_text(pids)

    def replace(self, rank: int) -> None:
        """Start another process in place of a sampler that was lost."""
        self._children[rank].end()  # it may be alive, and silent
        self._dead.pop(rank, None)
        self._children[rank] = self._started(rank)
        self._write_pids()

    # --- Workers --------------------------------------------------------------------------------------------------
    def call(self, method: str, *arguments: Plain) -> list[Plain]:
        """Call a method of every worker with the same arguments; returns the results by rank."""
        return Part(self, range(self.size)).call(method, *arguments)

    def call_one(self, rank: int, method: str, *arguments: Plain) -> Plain:
        """Call a method of one worker."""
        return Part(self, range(self.size)).call_one(rank, method, *arguments)

    def start(self, rank: int, method: str, *arguments: Plain) -> None:
        """Begin a call; a worker takes its calls one after the other."""
        self._children[rank].send(wire.dumps([method, arguments]))
        self._calls[rank].append(_Call(method, time.monotonic()))

    def results(self, seconds: float, ranks: Collection[int] | None = None, *, raises: bool = True) -> dict[int, Plain]:
        """Return results of started calls, as Workers says; with `ranks` only theirs. Without `raises` a Failure is a result."""
        present = {r: calls[0] for r, calls in enumerate(self._calls) if calls and (ranks is None or r in ranks)}
        rank, call = min(present.items(), key=lambda item: self._deadline(item[1]))
        ready = self._take(max(0.0, min(seconds, self._deadline(call) - time.monotonic())), present)
        if not ready and self._deadline(call) < time.monotonic():
            what = f"rank {rank} has not answered for {time.monotonic() - call.began:.0f} s"
            lost = WorkerLost(what, where=self._where(rank, call.method), fix=self._fix)
            if not self._spares(rank):
                raise self._end(lost)
            self._calls[rank].clear()
            ready = {rank: Lost(lost)}
        failed = {rank: one for rank, one in ready.items() if isinstance(one, Failure)}
        for rank in [r for r, one in failed.items() if one.kind == WorkerLost.__name__ and self._spares(r)]:
            self._calls[rank].clear()
            ready[rank] = Lost(WorkerLost(failed.pop(rank).what, where=self._where(rank, present[rank].method)))
        if failed and raises:
            raise self.failed(failed, {rank: one.method for rank, one in present.items()})
        return ready

    def _spares(self, rank: int) -> bool:
        """Return whether a lost worker may be replaced, and count that it is."""
        if rank < self._trainers or not self._spare:
            return False
        self._spare -= 1
        return True

    def _deadline(self, call: _Call) -> float:
        longest = self._longest.get(call.method)
        if longest is None:
            return call.began + self.timeout
        return call.began + max(min(LEAST_SECONDS, self.timeout), PATIENCE * longest)

    def close(self) -> None:
        """End all processes, at once."""
        for child in self._children:
            child.end()
        for meeting in (self._rendezvous, *self._folder.glob(f"{CHANNEL}_*")):
            meeting.unlink(missing_ok=True)

    # --- failures -------------------------------------------------------------------------------------------------
    def _take(self, seconds: float, present: Collection[int] | None = None) -> dict[int, Any]:
        """Return what has arrived, at most one of each rank: values, or a Failure."""
        wanted = range(self.size) if present is None else present
        end = time.monotonic() + seconds
        while not any(self._ready(rank) for rank in wanted):
            try:
                self._note(*self._inbox.get(timeout=max(0.0, end - time.monotonic())))
            except Empty:
                return {}
        while not self._inbox.empty():
            self._note(*self._inbox.get(timeout=0))
        return {rank: self._first(rank) for rank in wanted if self._ready(rank)}

    def _ready(self, rank: int) -> bool:
        calls = self._calls[rank]
        return bool(calls) and (calls[0].result is not _UNDER_WAY or rank in self._dead)

    def _first(self, rank: int) -> Any:
        result = self._calls[rank].popleft().result
        return self._dead[rank] if result is _UNDER_WAY else result

    def _note(self, child: Child, message: Any) -> None:
        """Keep a result with its call, or that a process has ended."""
        if child not in self._children:  # it was replaced
            return
        rank, now = self._children.index(child), time.monotonic()
        if message is ENDED:
            how = f"the worker died: {child.end(DEATH_SECONDS)}"
            self._dead[rank] = Failure(WorkerLost.__name__, how, "", "", time.time())
            return
        call, *later = (call for call in self._calls[rank] if call.result is _UNDER_WAY)
        if later:
            later[0].began = now
        state, value = message
        call.result = from_plain(Failure, value) if state == FAILED else value
        if state == OK:
            spent = now - call.began
            self.spent[rank, call.method] += spent
            self._longest[call.method] = max(spent, self._longest.get(call.method, 0.0))

    def failed(self, failed: dict[int, Failure], methods: dict[int, str]) -> LockstepError:
        """Return the error to raise: a death before what it caused in others, else the earliest."""
        end = time.monotonic() + SETTLE_SECONDS
        while any(self._calls) and time.monotonic() < end:
            more = self._take(end - time.monotonic())
            failed |= {rank: one for rank, one in more.items() if isinstance(one, Failure)}
        order = sorted(failed.items(), key=lambda item: (_weight(item[1]), item[1].when))
        rank, failure = order[0]
        kind = getattr(errors, failure.kind, None) if failure.kind else WorkerError
        where = self._where(rank, methods.get(rank, "a call"))
        if kind is WorkerLost or kind is WorkerError:
            log = self._folder / f"rank_{rank}.log"
            fix = self._fix if kind is WorkerLost else f"read {log}; if it does not show the cause, report this error"
            return self._end(kind(failure.what, where=where, fix=fix))
        if kind is None or not issubclass(kind, LockstepError) or issubclass(kind, ConfigError):
            return self._end(EngineError(failure.what, where=failure.where or where, fix=failure.fix))
        place = f"{failure.where} ({where})" if failure.where else where
        return self._end(kind(failure.what, where=place, fix=failure.fix))

    def _end(self, error: LockstepError) -> LockstepError:
        """Have the workers that still live write their stacks, and end all."""
        for child in self._children:
            child.signal(signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        self.close()
        return error

    def _where(self, rank: int, method: str) -> str:
        return f"rank {rank} in {method}"

    @property
    def _fix(self) -> str:
        return f"the stacks of the other workers are in {self._folder}; {self.again}"


class Part:
    """Some of a run's workers, numbered from 0; implements Workers."""

    def __init__(self, workers: ProcessWorkers, ranks: range) -> None:
        self.workers, self.ranks, self.size = workers, ranks, len(ranks)

    def call(self, method: str, *arguments: Plain) -> list[Plain]:
        """Call a method of every worker with the same arguments; returns the results by rank."""
        return self._called(range(self.size), method, *arguments)

    def call_one(self, rank: int, method: str, *arguments: Plain) -> Plain:
        """Call a method of one worker."""
        return self._called([rank], method, *arguments)[0]

    def _called(self, ranks: Sequence[int], method: str, *arguments: Plain) -> list[Plain]:
        for rank in ranks:
            self.start(rank, method, *arguments)
        found: dict[int, Plain] = {}
        while len(found) < len(ranks):
            for rank, value in self.results(self.workers.timeout, ranks).items():
                if isinstance(value, Lost):
                    self.revive(rank, value)
                    self.start(rank, method, *arguments)
                else:
                    found[rank] = value
        return [found[rank] for rank in ranks]

    def start(self, rank: int, method: str, *arguments: Plain) -> None:
        """Begin a call; a worker takes its calls one after the other."""
        self.workers.start(self.ranks[rank], method, *arguments)

    def results(self, seconds: float, ranks: Sequence[int] | None = None, *, raises: bool = True) -> dict[int, Plain]:
        """Return results of started calls, as ProcessWorkers does."""
        own = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        return {self.ranks.index(r): value for r, value in self.workers.results(seconds, own, raises=raises).items()}

    def revive(self, rank: int, lost: Lost) -> None:
        """Put another worker in place of one that is lost. Raises its error here: see Samplers."""
        raise lost.error

    def close(self) -> None:
        """End all workers of the run."""
        self.workers.close()


def _weight(failure: Failure) -> int:
    if failure.kind == WorkerLost.__name__:
        return 0
    return 1 if failure.kind else 2
