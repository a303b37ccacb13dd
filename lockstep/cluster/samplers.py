"""The workers that only sample. They receive the trainers' weights, and are replaced if they are lost."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from lockstep.cluster.process_workers import CHANNEL, LOST, Failure, ProcessWorkers, Workers
from lockstep.cluster.wire import GIVEN, WEIGHTS
from lockstep.errors import DEFECT, SyncError
from lockstep.sync.compare import RankProof
from lockstep.sync.fingerprint import Fingerprints
from lockstep.types import Forward


class Samplers(Workers):
    """Workers of a split run that sample. A lost one is replaced, gets the trainers' weights by a file, and is proven."""

    def __init__(self, processes: ProcessWorkers, ranks: range, trainers: Workers, recipe: str) -> None:
        super().__init__(processes, ranks)
        self._trainers, self._recipe = trainers, recipe
        self._forward: Forward | None = None
        self._version = -1
        self._joined = False

    def start(self, ranks: Sequence[int], method: str, *arguments: Any) -> None:
        """Begin a call, and remember how a worker that takes the place of one of these must compute."""
        if method == "engine.set_forward":
            (self._forward,) = arguments
        super().start(ranks, method, *arguments)

    def revive(self, rank: int) -> None:
        """Put another worker in place of one that is lost, and in place of that one if it is lost, too.

        Raises SyncError if its weights are not the trainers'.
        """
        self._joined, lost, found = False, True, dict[str, Any]()
        forward = [] if self._forward is None else [("engine.set_forward", self._forward)]  # noise lets no weights in
        calls: list[tuple[Any, ...]] = [("build", self._recipe, True), ("take", self._version), *forward]
        while lost:
            super().revive(rank)
            self._trainers.call_one(0, "write_weights")
            (self.folder / WEIGHTS).replace(self.folder / GIVEN)
            for call in calls:
                found[call[0]] = self.ask(rank, *call)
                if lost := found[call[0]] is LOST:
                    break
        (self.folder / GIVEN).unlink(missing_ok=True)
        if self._trainers.call_one(0, "held") != found["take"]:
            where = f"rank {self.ranks[rank]}, which replaces a lost worker"
            raise SyncError("a new worker holds different weights from the trainers", where=where, fix="resume the run")

    def feed(self, version: int) -> tuple[list[RankProof], list[Fingerprints]]:
        """Send the trainers' weights to all, which become this version; returns the trainers' proofs, and fingerprints of what
        each samples with. A worker goes on to its proof when it has sent or received. Raises the first error.
        """
        proofs: list[RankProof] = []
        while True:  # again if one was lost and replaced meanwhile
            if self._joined or self._join():
                method = "held" if proofs else "push"  # pushes are counted: some have a probe
                found = self._together((("exchange",), ("exchange",)), ((method,), ("take", version)))
                ours = [found[rank][-1] for rank in self._trainers.ranks]
                proofs = ours if all(isinstance(one, RankProof) for one in ours) else proofs
                if self._joined:
                    self._version = version
                    return proofs, [found[rank][-1] for rank in self.ranks]

    def _join(self) -> bool:
        """Open channels from the trainers to all; returns False if a sampler was lost."""
        meet = str(self.folder / f"{CHANNEL}_{secrets.token_hex(8)}")  # NCCL reads it in the first transfer
        self._joined = True  # unless `revive` says otherwise
        layouts = self._together((("join", meet), ("join", meet)))
        if self._joined and len({one for (one,) in layouts.values()}) > 1:
            what = "trainers and samplers disagree on which tensors are trained"
            raise SyncError(what, where="placement", fix=DEFECT)
        return self._joined

    def _together(self, *calls: tuple[tuple[Any, ...], tuple[Any, ...]]) -> dict[int, list[Any]]:
        """Have trainers and samplers make calls, the first and the second of each pair; returns the results by rank.

        A sampler that is lost, which fails the others' part, too, is replaced, and then all must join again.
        """
        found = {rank: list[Any]() for rank in (*self._trainers.ranks, *self.ranks)}
        failed, methods = dict[int, Failure](), dict[int, str]()
        for ours, theirs in calls:
            self._trainers.start(range(self._trainers.size), *ours)
            self.start(range(self.size), *theirs)
        while waiting := [rank for rank, one in found.items() if len(one) < len(calls) and LOST not in one]:
            for rank, result in self.processes.results(self.processes.timeout, waiting, raises=False).items():
                if isinstance(result, Failure) and rank not in failed:
                    failed[rank], methods[rank] = result, calls[len(found[rank])][rank in self.ranks][0]
                found[rank].append(result)
        lost = [rank for rank, one in found.items() if LOST in one]
        if failed and not lost:
            raise self.processes.failed(failed, methods)
        for rank in lost:
            self.revive(self.ranks.index(rank))
        return found
