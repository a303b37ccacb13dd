"""The engines of the workers as one, for a driver that has no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from lockstep.cluster.group import weights_of
from lockstep.cluster.process_workers import LOST, Workers
from lockstep.config.schema import Recipe
from lockstep.rollout.beside import SampledReply
from lockstep.rollout.requests import check_idle, check_version
from lockstep.sync.compare import agreed
from lockstep.sync.fingerprint import Fingerprints
from lockstep.types import Completion, Forward, ForwardReport, Grade, Request, TokenIds, WeightStream

SLICE_SECONDS = 0.1
"""Decoding between two messages of a worker."""
AHEAD = 2
"""Calls that a worker is given at once: it decodes on while the driver reads and grades what it sent."""
SPARE = 4
"""A worker that gets prompts as it has room has a waiting request per four rows: a free row need not wait for the driver."""
POLL_SECONDS = 0.02
"""Longest wait for completions while grades or environments may be ready."""


class GroupEngine:
    """The engines of all workers as one. All samples of a prompt are drawn by one of them."""

    def __init__(self, workers: Workers, recipe: Recipe) -> None:
        """Take the workers, to which requests are dealt as the recipe says."""
        self._workers, self.workers = workers, workers.size
        self._rows: int | None = None
        """Each gets further prompts when it has fewer requests than these; None: all at once, in turn."""
        if recipe.rollout.deal == "queue":
            slots = recipe.slots("cuda" if workers.processes.gpu else "cpu")
            self._rows = min(slots + slots // SPARE, -(-recipe.samples_per_step // workers.size))
        self.version = -1
        self.forward = Forward()
        self._prepared = set[int]()
        """Workers that have a grader: building one may take as long as a user's file takes to load."""
        self._forget()

    def _forget(self) -> None:
        """Have no requests."""
        self._queue: dict[str, list[Request]] = {}
        """Requests of the prompts that no worker has yet."""
        self._outbox: list[list[Request]] = [[] for _ in range(self.workers)]
        self._open: list[dict[str, Request]] = [{} for _ in range(self.workers)]
        """Requests that each worker has, by id."""
        self._asked = [0] * self.workers
        """Calls under way of each worker."""
        self._prompts: dict[str, int] = {}
        """Worker of each prompt of this version: it may keep keys and values for later turns while all environments work."""
        self._held = [0.0] * self.workers
        """Seconds in which each worker's engine waited for grades."""
        self._ungraded: dict[str, SampledReply] = {}
        """Replies whose grade is still to come, by request."""
        self._begun: dict[str, Request] = {}
        """Requests that workers have before they are submitted, by id."""

    def set_forward(self, forward: Forward) -> ForwardReport:
        """Compute in this way from now on, on all workers."""
        report: ForwardReport = self._workers.call("engine.set_forward", forward)[0]
        self.forward = forward
        return report

    def begin(self, requests: Sequence[Request]) -> None:
        """Have workers sample, as soon as they hold the next version, what `submit` will then ask for.

        They need not wait for the driver between two steps. Before any other call of theirs what was begun is dropped.
        """
        self._prompts.clear()
        self._begun = {request.id: request for request in requests}
        self._enqueue(requests)
        self._give(self._workers.begin)
        self._workers.withdraw = self.close

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises StaleWeightsError for another version."""
        for request in requests:
            check_version(request, self.version)
        begun, self._begun = self._begun, {}
        if begun and begun == {request.id: request for request in requests}:
            self._workers.withdraw = None
            return
        if begun:
            self.close()
        self._enqueue(requests)

    def _enqueue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            prompt = request.id.rpartition("#")[0]
            if prompt in self._prompts:  # later turns of an episode go where the first went
                self._outbox[self._prompts[prompt]].append(request)
            else:
                self._queue.setdefault(prompt, []).append(request)

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        """Yield completions as they finish, until no request is left."""
        while self._queue or any(self._outbox) or any(self._open) or any(self._asked):
            self._give(self._workers.start)
            yield from self._arrived(SLICE_SECONDS if between is None else POLL_SECONDS)
            if between is not None:
                between()
        self._held = [0.0] * self.workers

    def _give(self, start: Callable[..., None]) -> None:
        """Give the workers requests and calls, which `start` begins."""
        self._deal()
        for rank in range(self.workers):
            while self._asked[rank] < AHEAD and (self._outbox[rank] or self._open[rank]):
                self._ask(rank, start)

    def _deal(self) -> None:
        """Give prompts of the queue to the workers in turn, or if room counts to those that have it, the emptiest first."""
        while self._queue:
            held = [len(sent) + len(box) for sent, box in zip(self._open, self._outbox, strict=True)]
            rank = len(self._prompts) % self.workers if self._rows is None else held.index(min(held))
            if self._rows is not None and held[rank] >= self._rows:
                return
            prompt = next(iter(self._queue))
            self._prompts[prompt] = rank
            self._outbox[rank] += self._queue.pop(prompt)

    def _ask(self, rank: int, start: Callable[..., None]) -> None:
        requests, self._outbox[rank] = self._outbox[rank], []
        self._open[rank] |= {request.id: request for request in requests}
        if rank not in self._prepared and any(request.graded for request in requests):
            self._prepared.add(rank)
            start([rank], "prepare_grader")
            self._asked[rank] += 1
        start([rank], "sample", requests, SLICE_SECONDS)
        self._asked[rank] += 1

    def _arrived(self, seconds: float) -> list[Completion]:
        """Return completions, after at most so long a wait. The requests of a lost worker go to the one in its place."""
        completions: list[Completion] = []
        for rank, found in self._workers.results(seconds).items():
            if found is LOST:
                self._workers.revive(rank)
                self._prepared.discard(rank)
                self._outbox[rank] = [*self._open[rank].values(), *self._outbox[rank]]
                for request in self._open[rank]:
                    self._ungraded.pop(request, None)
                self._open[rank].clear()
                self._asked[rank] = 0
                continue
            self._asked[rank] -= 1
            if found is None:  # a grader was prepared
                continue
            for reply in found.replies:
                if self._open[rank][reply.request_id].graded:
                    self._ungraded[reply.request_id] = reply
                else:
                    completions.append(self._completion(rank, reply))
            for one in found.grades:
                (grade, took, held), longest = one.graded, max(self._held)
                self._held[rank] += held  # the worker that waits longest decides what grading adds
                graded = grade, took, max(self._held) - longest
                completions.append(self._completion(rank, self._ungraded.pop(one.request_id), graded))
        return completions

    def _completion(self, rank: int, one: SampledReply, graded: tuple[Grade, float, float] | None = None) -> Completion:
        request = self._open[rank].pop(one.request_id)
        return Completion(request, one.ids, one.logprobs, one.finish, one.version, one.read, one.routes, graded)

    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Return the log-probability of every token but the first, by the first worker's engine."""
        return list(self._workers.call_one(0, "engine.score", sequences))

    def load(self, weights: WeightStream, version: int) -> None:
        """Become `version`: the workers' engines read their learners' weights."""
        if self._begun and all(request.version == version for request in self._begun.values()):
            self.version = version
            return
        check_idle(len(self._queue) + sum(map(len, (*self._open, *self._outbox))), version)
        self._prompts.clear()
        self.version = version

    def fingerprints(self) -> Fingerprints:
        """Return fingerprints of what samples. Raises SyncError if the workers hold different weights."""
        return agreed(self._workers.call("held"))

    def weights(self, only: Collection[str] = ()) -> WeightStream:
        """Return what the first worker samples with, read from a file."""
        return ((name, tensor) for name, tensor in weights_of(self._workers).items() if not only or name in only)

    def close(self) -> None:
        """Drop all requests."""
        self._workers.take_early()
        self._workers.withdraw = None
        while any(self._asked):
            self._arrived(SLICE_SECONDS)
        self._workers.call("drop")
        self._forget()
