"""Workers as processes of this machine, one for each GPU or CPU process. All messages are plain values, through pipes."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from lockstep import errors
from lockstep.cluster import wire
from lockstep.cluster.child import ENDED, Child, Inbox, take
from lockstep.cluster.host import FAILED, OK, SAMPLER, TRAINER
from lockstep.config.schema import Colocated, Split
from lockstep.errors import ConfigError, EngineError, LockstepError, WorkerError, WorkerLost
from lockstep.plain_values import from_plain, kinds_of, to_plain
from lockstep.types import Metrics

LEAST_SECONDS = 120.0
"""Shortest deadline of a call whose duration is known."""
PATIENCE = 5.0
"""A call may take this many times as long as the longest of its kind so far."""
SETTLE_SECONDS = 2.0
"""After a first failure, time for the news of what caused it: a broken connection is heard of before the death behind it."""
GRACE_SECONDS = 5.0
"""After a deadline, time for an answer to be read: the driver itself may have been stopped meanwhile."""
STACK_SECONDS = 0.5
DEATH_SECONDS = 1.0
"""A process whose pipe has closed has this long to end by itself, so that how it ended is known."""
PIDS = "pids.txt"
PHASES = {"sample": "rollout", "push": "sync"} | dict.fromkeys(
    ("learner.response_logprobs", "learner.begin_update", "train", "learner.finish_update"), "update"
)
"""Methods of a worker whose seconds are logged, and their phase."""
MEETING, CHANNEL = "rendezvous", "channel"
"""Starts of the names of files by which processes meet, to train together and to send weights."""
LOST = object()
"""Stands for the results of a worker that only sampled, and is no more."""
_UNDER_WAY = object()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a worker."""

    kind: str
    """Name of its class; "" for one that is not Lockstep's."""
    what: str
    where: str
    fix: str
    when: float
    """Unix time."""


@dataclass(slots=True)
class _Call:
    """A call of a worker's method."""

    method: str
    kind: Any
    """Type of its result."""
    began: float
    """When it was its turn."""
    deadline: float
    """By what was known when it began: a worker with less to do may answer much sooner."""
    result: Any
    """Value that was returned, or a Failure."""


class ProcessWorkers:
    """The processes of a run: those that train, then those that only sample and may be replaced."""

    def __init__(self, placement: Colocated | Split, folder: Path, *, gpu: bool, trainer: str = TRAINER) -> None:
        """Start the processes. `trainer`: class of the first ones."""
        self.folder, self.gpu, self.timeout = folder, gpu, placement.timeout_s
        self.again = "continue with lockstep train --resume"
        self.size = size = placement.trainers + placement.samplers
        self._spent: defaultdict[str, float] = defaultdict(float)
        """Seconds of each rank and phase since the last step, by the name of their metric."""
        self._trainer, self._trainers, self._spare = trainer, placement.trainers, placement.restarts
        self._calls: list[deque[_Call]] = [deque() for _ in range(size)]
        """Calls by rank whose results were not taken yet, the oldest first."""
        self._longest: dict[str, float] = {}
        self._dead: dict[int, Failure] = {}
        self._inbox: Inbox = SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        self._clean()  # a driver that was killed left them
        meet = str(folder / f"{MEETING}_{secrets.token_hex(8)}")
        threads = max(1, (os.cpu_count() or size) // size)
        self._place = wire.Place(0, self._trainers, str(folder), meet, threads, placement.samplers)
        self._children: dict[int, Child] = {}
        for rank in range(size):
            self._begin(rank)

    def _begin(self, rank: int) -> None:
        """Start a process, and write down the ids of all."""
        child = self._children[rank] = take(self._place.threads)
        child.connect(self._inbox)
        child.send(wire.dumps([astuple(replace(self._place, rank=rank)), self._class(rank)]))
        pids = "".join(f"rank {rank}: {child.pid}\n" for rank, child in self._children.items())
        (self.folder / PIDS).write_text(pids)

    def _class(self, rank: int) -> str:
        return self._trainer if rank < self._trainers else SAMPLER

    def replace(self, rank: int) -> None:
        """Start another process in place of a sampler that was lost."""
        self._children[rank].end()  # it may be alive, and silent
        self._dead.pop(rank, None)
        self._begin(rank)

    def phase_seconds(self) -> Metrics:
        """Return what each worker spent on the phases of a step, and begin again at 0."""
        spent, self._spent = self._spent, defaultdict(float)
        return dict(spent)

    def close(self) -> None:
        """End all processes, at once."""
        for child in self._children.values():
            child.end()
        self._clean()

    def _clean(self) -> None:
        """Delete the files by which processes meet, and tensors under way."""
        for pattern in (f"{MEETING}_*", f"{CHANNEL}_*", "*.safetensors"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    # --- calls ----------------------------------------------------------------------------------------------------
    def start(self, ranks: Sequence[int], method: str, *arguments: Any) -> None:
        """Begin a call of a method that these workers share; each takes its calls one after the other."""
        kinds, returned = kinds_of(self._class(ranks[0]), method)
        given = zip(kinds.items(), arguments, strict=True)
        message = wire.dumps([method, {name: to_plain(kind, value) for (name, kind), value in given}])
        for rank in ranks:
            self._children[rank].send(message)
            now, result = time.monotonic(), self._dead.get(rank, _UNDER_WAY)
            self._calls[rank].append(_Call(method, returned, now, now + self._limit(method), result))

    def results(self, seconds: float, ranks: Collection[int], *, raises: bool = True) -> dict[int, Any]:
        """Return results of started calls by rank, each worker's oldest, waiting at most so long for the first one.

        LOST stands for those of a worker that must be replaced. Without `raises` a Failure is a result, unless it is silence.
        """
        present = {rank: self._calls[rank][0] for rank in ranks if self._calls[rank]}
        rank, call = min(present.items(), key=lambda item: item[1].deadline)
        ready = self._take(max(0.0, min(seconds, call.deadline - time.monotonic())), present)
        late = call.deadline < time.monotonic()
        if silent := late and not ready and not (ready := self._take(GRACE_SECONDS, present)):
            what = f"rank {rank} has not answered for {time.monotonic() - call.began:.0f} s"
            if others := [str(other) for other in present if other != rank]:
                what += f"; neither has rank {', '.join(others)}: one of them may wait for another"
            ready = {rank: Failure(WorkerLost.__name__, what, "", "", time.time())}
        for rank, one in ready.items():
            if isinstance(one, Failure) and one.kind == WorkerLost.__name__ and self._spares(rank):
                self._calls[rank].clear()
                ready[rank] = LOST
        failed = {rank: one for rank, one in ready.items() if isinstance(one, Failure)}
        if failed and (raises or silent):
            raise self.failed(failed, {rank: one.method for rank, one in present.items()})
        return ready

    def _spares(self, rank: int) -> bool:
        """Return whether a lost worker may be replaced, and count that it is."""
        if rank < self._trainers or not self._spare:
            return False
        self._spare -= 1
        return True

    def _limit(self, method: str) -> float:
        longest = self._longest.get(method)
        return self.timeout if longest is None else max(min(LEAST_SECONDS, self.timeout), PATIENCE * longest)

    def _take(self, seconds: float, ranks: Collection[int]) -> dict[int, Any]:
        """Return what has arrived, at most one of each rank: values, or a Failure."""
        end = time.monotonic() + seconds
        while not any(self._ready(rank) for rank in ranks):
            try:
                self._note(*self._inbox.get(timeout=max(0.0, end - time.monotonic())))
            except Empty:
                return {}
        while not self._inbox.empty():
            self._note(*self._inbox.get(timeout=0))
        return {rank: self._calls[rank].popleft().result for rank in ranks if self._ready(rank)}

    def _ready(self, rank: int) -> bool:
        calls = self._calls[rank]
        return bool(calls) and calls[0].result is not _UNDER_WAY

    def _note(self, child: Child, message: Any, came: float) -> None:
        """Keep a result with its call, or that a process has ended. It may have come while the driver did something else."""
        rank = next((rank for rank, one in self._children.items() if one is child), None)
        if rank is None:  # it was replaced
            return
        waiting = [call for call in self._calls[rank] if call.result is _UNDER_WAY]
        if message is ENDED:
            how = f"the worker died: {child.end(DEATH_SECONDS)}"
            self._dead[rank] = Failure(WorkerLost.__name__, how, "", "", time.time())
            for call in waiting:
                call.result = self._dead[rank]
            return
        if not waiting:  # it was given up while others still worked, and answers after all
            return
        call, *later = waiting
        if later:
            later[0].began, later[0].deadline = came, time.monotonic() + self._limit(later[0].method)
        state, value = message
        call.result = Failure(*value) if state == FAILED else from_plain(call.kind, value)
        if state == OK:
            spent = came - call.began
            if phase := PHASES.get(call.method):
                self._spent[f"time/rank{rank}_{phase}"] += spent
            self._longest[call.method] = max(spent, self._longest.get(call.method, 0.0))

    # --- failures -------------------------------------------------------------------------------------------------
    def failed(self, failed: dict[int, Failure], methods: dict[int, str]) -> LockstepError:
        """Return the error to raise: a death before what it caused in others, else the earliest."""
        end = time.monotonic() + SETTLE_SECONDS
        while any(self._calls) and time.monotonic() < end:
            more = self._take(end - time.monotonic(), range(self.size))
            failed = {rank: one for rank, one in more.items() if isinstance(one, Failure)} | failed
        lost = WorkerLost.__name__
        rank, failure = min(failed.items(), key=lambda item: (item[1].kind != lost, not item[1].kind, item[1].when))
        kind = getattr(errors, failure.kind, None) if failure.kind else WorkerError
        where = f"rank {rank} in {methods.get(rank, 'a call').rpartition('.')[2]}"
        fix = failure.fix
        if kind is WorkerLost:
            fix = f"the stacks of the other workers are in {self.folder}; {self.again}"
        elif kind is WorkerError:
            fix = f"read {self.folder / f'rank_{rank}.log'}; if it does not show the cause, report this error"
        elif kind is None or not issubclass(kind, LockstepError) or issubclass(kind, ConfigError):
            kind, where = EngineError, failure.where or where
        elif failure.where:
            where = f"{failure.where} ({where})"
        return self._end(kind(failure.what, where=where, fix=fix))

    def _end(self, error: LockstepError) -> LockstepError:
        """Have the workers that still live write their stacks, and end all."""
        for child in self._children.values():
            child.signal(signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        self.close()
        return error


class Workers:
    """Some of a run's workers, numbered from 0; every call ends in time or raises.

    Raises the first error that a worker met, WorkerError for an unexpected one, WorkerLost for a worker that died or fell silent;
    then all workers of the run have been ended.
    """

    def __init__(self, processes: ProcessWorkers, ranks: range) -> None:
        self.processes, self.ranks, self.size, self.folder = processes, ranks, len(ranks), processes.folder
        self._early: dict[str, list[Any]] = {}
        """Results of calls that were made ahead, by method; none yet of those under way."""
        self.withdraw: Callable[[], None] | None = None
        """Ends what was begun ahead, before any other call; None if nothing was."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker with the same arguments; returns the results by rank."""
        self.take_early()
        return self._early.pop(method, []) or self._called(range(self.size), method, *arguments)

    def call_ahead(self, method: str) -> None:
        """Begin a call that `call` may ask for."""
        self.processes.start(self.ranks, method)
        self._early.pop(method, None)  # results come in the order of the calls
        self._early[method] = []

    def begin(self, ranks: Sequence[int], method: str, *arguments: Any) -> None:
        """Begin a call behind those that were made ahead, whose results are still to come."""
        self.processes.start([self.ranks[rank] for rank in ranks], method, *arguments)

    def take_early(self) -> None:
        """Take the results of calls that were made ahead: they come before those of any other."""
        for method, found in self._early.items():
            self._early[method] = found or self.collect(range(self.size), method)

    def call_one(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method of one worker."""
        return self._called([rank], method, *arguments)[0]

    def _called(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        self.start(ranks, method, *arguments)
        return self.collect(ranks, method, *arguments)

    def collect(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Return the results of a call that was started; a worker that replaces a lost one is called again."""
        found: dict[int, Any] = {}
        while waiting := [rank for rank in ranks if rank not in found]:
            for rank, value in self.results(self.processes.timeout, waiting).items():
                if value is LOST:
                    self.revive(rank)
                    self.start([rank], method, *arguments)
                else:
                    found[rank] = value
        return [found[rank] for rank in ranks]

    def ask(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method of one worker; returns LOST if that is lost, and must be replaced."""
        self.start([rank], method, *arguments)
        found: dict[int, Any] = {}
        while not found:
            found = self.results(self.processes.timeout, [rank])
        return found[rank]

    def start(self, ranks: Sequence[int], method: str, *arguments: Any) -> None:
        """Begin a call of these; a worker takes its calls one after the other."""
        self.take_early()
        if self.withdraw is not None:
            withdraw, self.withdraw = self.withdraw, None
            withdraw()
        self.begin(ranks, method, *arguments)

    def results(self, seconds: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Return results of started calls as ProcessWorkers does, of all or of these."""
        own = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        return {self.ranks.index(rank): value for rank, value in self.processes.results(seconds, own).items()}

    def revive(self, rank: int) -> None:
        """Put another worker in place of one that is lost."""
        self.processes.replace(self.ranks[rank])
