"""The workers that only sample. They receive the trainers' weights, and are replaced if they are lost."""

from __future__ import annotations

import secrets
from pathlib import Path

from lockstep.cluster.messages import START, WEIGHTS, Failure, Lost, Plain, Prints, Values
from lockstep.cluster.plain import from_plain
from lockstep.cluster.process_workers import CHANNEL, Part, ProcessWorkers
from lockstep.errors import DEFECT, SyncError


class Samplers(Part):
    """Workers of a split run that sample. A lost one is replaced, gets the trainers' weights by a file, and is proven."""

    def __init__(self, workers: ProcessWorkers, ranks: range, trainers: Part, recipe: str, folder: Path) -> None:
        super().__init__(workers, ranks)
        self._trainers, self._recipe, self._folder = trainers, recipe, folder
        self._forward: Plain = None
        self._version = -1
        self._joined = False

    def start(self, rank: int, method: str, *arguments: Plain) -> None:
        """Begin a call, and remember what a worker that takes this one's place must be told."""
        match method:
            case "set_forward":
                self._forward = arguments[0]
            case "serve":
                self._version = arguments[0]
        super().start(rank, method, *arguments)

    def revive(self, rank: int, lost: Lost) -> None:
        """Put another worker in place of one that is lost. Raises SyncError if its weights are not the trainers'."""
        self._joined = False
        self.workers.replace(self.ranks[rank])
        self._trainers.call_one(0, "write_weights")
        (self._folder / WEIGHTS).replace(self._folder / START)
        self.call_one(rank, "build", self._recipe, True)
        (self._folder / START).unlink(missing_ok=True)
        self.call_one(rank, "serve", self._version)
        truth, held = self._trainers.call_one(0, "held"), self.call_one(rank, "held")
        if from_plain(Prints, truth) != from_plain(Prints, held):
            where = f"rank {self.ranks[rank]}, which replaces a lost worker"
            raise SyncError("a new worker holds different weights from the trainers", where=where, fix="resume the run")
        if self._forward is not None:
            self.call_one(rank, "set_forward", self._forward)

    def feed(self, version: int) -> None:
        """Send the trainers' weights to all, which become this version. Raises the first error."""
        while not self._fed():
            self._joined = False
        self.call("serve", version)

    def _fed(self) -> bool:
        """Send the weights; returns False if a worker was lost and replaced meanwhile."""
        if not self._joined:
            meet = str(self._folder / f"{CHANNEL}_{secrets.token_hex(8)}")  # NCCL reads it in the first transfer
            found = self._together(("join", meet), ("join", meet))
            if found is None:
                return False
            if len(set(found)) > 1:
                raise SyncError(
                    "trainers and samplers disagree on which tensors are trained", where="placement", fix=DEFECT
                )
            self._joined = True
        return self._together(("give",), ("take",)) is not None

    def _together(self, train: tuple[str, ...], sample: tuple[str, ...]) -> list[Plain] | None:
        """Have trainers and samplers do what takes both; None if a sampler was lost, which fails the others' part, too."""
        parts: list[tuple[Part, tuple[str, ...]]] = [(self._trainers, train), (self, sample)]
        for part, (method, *arguments) in parts:
            for rank in range(part.size):
                part.start(rank, method, *arguments)
        waiting = {*self._trainers.ranks, *self.ranks}
        found: dict[int, Plain] = {}
        while waiting:
            found |= self.workers.results(self.workers.timeout, waiting, raises=False)
            waiting -= found.keys()
        lost = {rank: one for rank, one in found.items() if isinstance(one, Lost)}
        failed = {rank: one for rank, one in found.items() if isinstance(one, Failure)}
        if failed and not lost:
            raise self.workers.failed(failed, dict.fromkeys(failed, train[0]))
        for rank, one in lost.items():
            self.revive(self.ranks.index(rank), one)
        return None if lost else list(found.values())

    def require_same_scores(self, trainers: int) -> None:
        """Compare each engine's log-probabilities of the probe with the learner's. Raises SyncError."""
        rows, values, tolerance = self._trainers.call_one(0, "probe")
        ours = [value for row in from_plain(Values, values).rows for value in row]
        for rank, plain in enumerate(self.call("score", rows)):
            theirs = [value for row in from_plain(Values, plain).rows for value in row]
            gap = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
            if not gap <= tolerance:
                raise SyncError(
                    f"the worker's log-probabilities of the probe differ by {gap:.3g} on average; {tolerance:.3g} is allowed",
                    where=f"rank {trainers + rank}",
                    fix="use no sample of this run's last step; resume from the last checkpoint",
                )
