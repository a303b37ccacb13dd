"""Workers as Ray actors of this machine, one for each GPU or CPU process.

Ray is started for this run alone: it joins no existing cluster, and answers only clients that have the run's token. All
messages are plain values.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep import errors
from lockstep.cluster.host import FAILED, Host
from lockstep.cluster.messages import Failure, Lost, Place, Plain
from lockstep.cluster.plain import from_plain, to_plain
from lockstep.cluster.reaper import reaped
from lockstep.errors import ConfigError, EngineError, LockstepError, WorkerError, WorkerLost

LEAST_SECONDS = 120.0
"""Shortest deadline of a call whose duration is known."""
PATIENCE = 5.0
"""A call may take this many times as long as the longest of its kind so far."""
SETTLE_SECONDS = 2.0
"""After a first failure, time for the news of what caused it: a broken connection is heard of before the death behind it."""
STACK_SECONDS = 0.5
PIDS = "pids.txt"
CHANNEL = "channel"
"""Start of the names of files by which processes meet to send weights."""
OBJECT_STORE = 512 * 2**20
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # each worker sees all GPUs, as NCCL must
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_worker_niceness": "0",  # its default lets every other program go first
    "GLOO_SOCKET_IFNAME": "lo",
}


TOKEN = secrets.token_hex(32)
"""Password of this process's Ray, which reads it once in a process."""


@dataclass(slots=True)
class _Call:
    """A call of a worker's method."""

    reference: Any
    method: str
    began: float
    """When it was its turn."""


class RayWorkers:
    """Implements Workers: `size` processes that train, then `samplers` that only sample and may be replaced."""

    def __init__(
        self,
        size: int,
        folder: Path,
        *,
        gpu: bool,
        timeout: float,
        threads: int | None,
        samplers: int = 0,
        spare: int = 0,
        host: type[Host] = Host,
    ) -> None:
        """Start the processes. `spare`: times that a lost sampler may be replaced. Raises EngineError without Ray."""
        self.timeout, self._folder, self._trainers, self._spare = timeout, folder, size, spare
        self.again = "continue with lockstep train --resume"
        self.size, self.gpu = (size := size + samplers), gpu
        self._calls: list[deque[_Call]] = [deque() for _ in range(size)]
        """Calls under way by rank, the oldest first."""
        self._longest: dict[str, float] = {}
        self.spent: defaultdict[tuple[int, str], float] = defaultdict(float)
        """Seconds of each rank and method."""
        self._pids: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._rendezvous = folder / f"rendezvous_{secrets.token_hex(8)}"
        with ExitStack() as ends:
            scratch = ends.enter_context(TemporaryDirectory(prefix="lockstep-ray-", ignore_cleanup_errors=True))
            ends.enter_context(reaped(scratch))
            self._ray = _start_ray(size, scratch, gpu=gpu)
            self._ends = ends.pop_all()
        self._place = Place(0, self._trainers, str(folder), str(self._rendezvous), threads, samplers)
        self._actor = self._ray.remote(num_cpus=1, num_gpus=int(gpu), max_restarts=0, max_task_retries=0)(host)
        self._actors = [self._started(rank) for rank in range(size)]
        try:
            self._pids = self._ray.get([actor.pid.remote() for actor in self._actors], timeout=timeout)
        except Exception as error:
            self.close()
            raise WorkerLost(
                f"the workers did not start: {error}", fix=f"read the workers' logs in {folder}"
            ) from error
        self._write_pids()

    def _started(self, rank: int) -> Any:
        return self._actor.remote(to_plain(Place, replace(self._place, rank=rank)))

    def _write_pids(self) -> None:
        (self._folder / PIDS).write_text("".join(f"rank {rank}: {pid}\n" for rank, pid in enumerate(self._pids)))

    def replace(self, rank: int) -> None:
        """Start another process in place of a sampler that was lost. Raises WorkerLost if it does not start."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._pids[rank], signal.SIGKILL)  # it may be alive, and silent
        self._actors[rank] = self._started(rank)
        try:
            self._pids[rank] = self._ray.get(self._actors[rank].pid.remote(), timeout=self.timeout)
        except Exception as error:
            what = f"rank {rank} was lost, and the worker that should replace it did not start: {error}"
            raise self._end(WorkerLost(what, fix=self._fix)) from error
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
        reference = self._actors[rank].call.remote(method, list(arguments))
        self._calls[rank].append(_Call(reference, method, time.monotonic()))

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
        self._ray.shutdown()  # first: it would print a page about each worker that died before
        for pid in self._pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._pids = []
        self._ends.close()
        for meeting in (self._rendezvous, *self._folder.glob(f"{CHANNEL}_*")):
            meeting.unlink(missing_ok=True)

    # --- failures -------------------------------------------------------------------------------------------------
    def _take(self, seconds: float, present: Collection[int] | None = None) -> dict[int, Any]:
        """Return what has arrived, at most one of each rank: values, or a Failure."""
        wanted = range(self.size) if present is None else present
        ranks = {self._calls[rank][0].reference: rank for rank in wanted if self._calls[rank]}
        done, _ = self._ray.wait(list(ranks), num_returns=1, timeout=seconds)
        if done:  # take all that are there
            done, _ = self._ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
        found: dict[int, Any] = {}
        for reference in done:
            rank = ranks[reference]
            call = self._calls[rank].popleft()
            now = time.monotonic()
            if self._calls[rank]:
                self._calls[rank][0].began = now
            try:
                state, value = self._ray.get(reference, timeout=self.timeout)
            except self._ray.exceptions.RayError as error:
                found[rank] = Failure(WorkerLost.__name__, _death(error), "", "", time.time())
                continue
            spent = now - call.began
            self.spent[rank, call.method] += spent
            self._longest[call.method] = max(spent, self._longest.get(call.method, 0.0))
            found[rank] = from_plain(Failure, value) if state == FAILED else value
        return found

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
        for pid in self._pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
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

    def __init__(self, workers: RayWorkers, ranks: range) -> None:
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
        """Return results of started calls, as RayWorkers does."""
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


def _death(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"the worker died: {lines[0] if lines else type(error).__name__}"


def _start_ray(size: int, scratch: str, *, gpu: bool) -> Any:
    """Start a Ray of our own. Raises WorkerLost if that fails: on a busy machine it may be too slow."""
    with _environment({**ENVIRONMENT, "RAY_AUTH_TOKEN": TOKEN}), _own_signals():
        ray = _import_ray()
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=size,
                num_gpus=size if gpu else 0,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE,
                _node_ip_address="127.0.0.1",
                _temp_dir=scratch,
            )
        except Exception as error:
            ray.shutdown()
            raise WorkerLost(
                f"Ray did not start: {error}", where="placement", fix="check the machine with lockstep doctor"
            ) from error
        return ray


@cache
def _import_ray() -> Any:
    """Import Ray, which reads the token then. Raises EngineError without Ray, or if it was imported before."""
    if "ray" in sys.modules:
        what = "this process imported Ray before the run's access token was set"
        raise EngineError(what, where="placement", fix="start the run in a new process: lockstep train")
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "Ray is not installed, but workers need it",
            where="placement",
            fix="pip install 'lockstep-rl[cluster]', or set placement.kind=local",
        ) from error
    return ray


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that are inherited by processes started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers: a run that gets SIGTERM saves first, and Ray would exit at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
