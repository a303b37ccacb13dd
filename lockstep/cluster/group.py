"""Learner, critic and sync of a run on several workers, for a driver that has no model."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from lockstep.build.parts import Meanwhile
from lockstep.checkpoint.state import take_tensors, write_tensors
from lockstep.cluster.process_workers import Workers
from lockstep.cluster.samplers import Samplers
from lockstep.cluster.wire import GIVEN, PART, WEIGHTS
from lockstep.errors import SyncError
from lockstep.learner.packing import microbatches
from lockstep.learner.protocol import LearnerState, Share, scored_by, update_metrics
from lockstep.learner.ranks import deal
from lockstep.learner.value_head import CriticShare, critic_metrics
from lockstep.sync.compare import RankProof, agreed, differing
from lockstep.sync.control import blind
from lockstep.sync.fingerprint import Fingerprints
from lockstep.types import (
    Batch,
    Learner,
    LearnerFacts,
    Loss,
    Metrics,
    Proof,
    RolloutEngine,
    Scored,
    TokenIds,
    TrainSequence,
    WeightStream,
)

BETWEEN = ("push", "gpu_peak", "refresh")
"""Calls between an update and a rollout, which workers make while the driver judges and logs the step."""


class GroupLearner:
    """The learners of all workers as one."""

    def __init__(self, workers: Workers, facts: LearnerFacts, meanwhile: Meanwhile, *, pushes: bool = False) -> None:
        """Take the workers. `pushes`: after each update comes a push, which they need not be asked for."""
        self._workers, self._facts, self._meanwhile, self._pushes = workers, facts, meanwhile, pushes
        self.version = 0
        self.skipped = 0
        self.scored: tuple[Scored, ...] = ()

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step on a batch. The workers take the loss from the recipe, as `loss` was."""
        workers, everyone, facts, sequences = self._workers, range(self._workers.size), self._facts, batch.sequences
        tokens, share = facts.microbatch_tokens, facts.share_prompts
        rounds = deal(microbatches(sequences, tokens, share_prompts=share, prefix=batch.prefix), workers.size)
        workers.start(everyone, "learner.begin_update")
        for number, dealt in enumerate(rounds):  # the workers train on each while the next are written
            for rank in everyone:
                own = dealt[rank] if rank < len(dealt) else []
                part = replace(batch, sequences=tuple(sequences[place] for place in own))
                workers.start([rank], "train", part, own, number * workers.size + rank, len(dealt))
        workers.start(everyone, "learner.finish_update")
        for method in BETWEEN if self._pushes else ():
            workers.call_ahead(method)
        self._meanwhile.do()
        for method in ("learner.begin_update", *["train"] * len(rounds)):
            workers.collect(everyone, method)
        shares: list[Share] = workers.collect(everyone, "learner.finish_update")
        self.version, self.skipped, self.scored = self.version + 1, shares[0].skipped, scored_by(shares)
        return update_metrics(shares)

    def response_logprobs(
        self, sequences: Sequence[TrainSequence], temperature: float, *, reference: bool = False, prefix: int = 0
    ) -> list[tuple[float, ...]]:
        """Return the log-probability of each response token, as TorchLearner does."""
        return _joined(self._workers.call("learner.response_logprobs", sequences, temperature, reference, prefix))

    def logprobs(self, sequences: Sequence[TokenIds], numeric: str = "") -> list[tuple[float, ...]]:
        """Return the log-probability of every token but the first of each sequence, by the first worker."""
        return list(self._workers.call_one(0, "learner.logprobs", sequences, numeric))

    def weights(self) -> WeightStream:
        """Return the weights of the first worker, read from a file."""
        return iter(weights_of(self._workers).items())

    def prepare_numerics(self, numeric: str) -> tuple[int, tuple[str, ...]]:
        """Prepare for a numeric; returns the number of quantised layers, and the names of those left alone."""
        layers, alone = self._workers.call("learner.prepare_numerics", numeric)[0]
        return layers, alone

    def describe(self) -> LearnerFacts:
        """Return facts for the log and the manifest."""
        return self._facts

    def fingerprint(self, *, frozen: bool = False, only: Collection[str] = ()) -> Fingerprints:
        """Return fingerprints as TorchLearner does. Raises SyncError if the workers hold different weights."""
        return agreed(self._workers.call("learner.fingerprint", frozen, list(only)))

    def save(self) -> LearnerState:
        """Return the content of a checkpoint, which is that of a single learner."""
        file, texts, counters = self._workers.call("save")[0]
        return LearnerState(file, take_tensors(self._workers.folder / WEIGHTS), texts, _parts(self._workers), counters)

    def restore(self, counters: Mapping[str, int], optimizer: Mapping[str, Tensor]) -> None:
        """Continue where `counters` and the optimizer's tensors were saved, by any number of workers."""
        _give(self._workers, optimizer, "learner", counters)
        self.version, self.skipped = counters["version"], counters["skipped"]


class GroupCritic:
    """The critics of all workers as one."""

    def __init__(self, workers: Workers, *, joint: bool) -> None:
        self._workers, self.joint = workers, joint or None

    def values(self, sequences: Sequence[TrainSequence], prefix: int = 0) -> list[tuple[float, ...]]:
        """Return the value before each response token, as TorchCritic does."""
        return _joined(self._workers.call("critic.values", sequences, prefix))

    def update(self, batch: Batch) -> Metrics:
        """Make one optimizer step towards the returns."""
        shares: list[CriticShare] = self._workers.call("critic.update_share", batch)
        return critic_metrics(shares) | {"critic/oom_splits": float(sum(share.splits for share in shares))}

    def counters(self) -> dict[str, int]:
        return dict(self._workers.call_one(0, "critic.counters"))

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer."""
        self._workers.call("write_critic")
        return _parts(self._workers)

    def restore(self, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Continue where counters and tensors were saved, by any number of workers."""
        _give(self._workers, tensors, "critic", counters)


class GroupSync:
    """The proof that all workers hold the same weights: those that the owners of the tensors made.

    An update ends with the exchange of the weights, so nothing is sent here. Each worker proves its own engine; then all
    fingerprints are compared with those that the owners made before they sent anything.
    """

    sent = 0
    """Bytes sent by the last push."""

    def __init__(self, workers: Workers, samplers: Samplers | None = None) -> None:
        """Take the workers that train, and those that only sample if there are any."""
        self._workers, self._samplers = workers, samplers
        self.shift: float | None = None
        """Distance of the policy between probes: see Prover.shift."""

    def push(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Give the engines the learner's version and prove it. Raises SyncError naming tensors and ranks."""
        start = time.perf_counter()
        engine.load(iter(()), learner.version)
        found, held = self._samplers.feed(learner.version) if self._samplers else (self._workers.call("push"), [])
        proof = self._proof(found, held)
        return replace(proof, seconds=max(time.perf_counter() - start, *(one.proof.seconds for one in found)))

    def verify(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Prove everything without changing anything. Raises SyncError."""
        return self._proof(self._workers.call("verify"), self._samplers.call("reprove") if self._samplers else [])

    def negative_control(self, learner: Learner, engine: RolloutEngine) -> str:
        """Flip one bit on one worker, each time another one: the comparison must name the tensor and the rank.

        Returns the tensor's name. Raises SyncError if the proof is blind.
        """
        places = [(group, rank) for group in self._groups for rank in range(group.size)]
        rank = (learner.version - 1) % len(places)
        group, own = places[rank]
        before = self._held()
        name: str = group.call_one(own, "falsify")
        found = self._held()
        group.call_one(own, "falsify")
        seen = [str(fault) for fault in differing(before[rank - 1], found)]
        if seen != [f"{name}: differs, other values on rank {rank}"]:
            raise blind(f"{name} on rank {rank}", seen)
        if self._held() != before:
            what = "the bit that was flipped to test the proof was not restored"
            raise SyncError(what, where=name, fix="resume the run")
        return name

    def _held(self) -> list[Fingerprints]:
        """Return the fingerprints of what every worker samples with."""
        return [one for group in self._groups for one in group.call("held")]

    @property
    def _groups(self) -> list[Workers]:
        return [self._workers, *([self._samplers] if self._samplers is not None else [])]

    def _proof(self, found: Sequence[RankProof], samplers: Sequence[Fingerprints]) -> Proof:
        proofs, held = [one.proof for one in found], [*(one.held for one in found), *samplers]
        truth = dict(held[0].tensors)
        for one in found:
            truth |= one.truth
        if faults := differing(Fingerprints(truth), held):
            what, first = "tensors differ from those of the workers that own them", "; ".join(map(str, faults[:8]))
            fix = "use no sample and no score of this run's last step; resume from the last checkpoint"
            raise SyncError(f"{len(faults)} {what}: {first}", where=f"sync of version {proofs[0].version}", fix=fix)
        self.shift = found[0].shift
        return max(proofs, key=lambda proof: proof.probe.mean if proof.probe else 0.0)


def _joined(shares: Sequence[Sequence[tuple[float, ...]]]) -> list[tuple[float, ...]]:
    """Return the rows of all ranks as one list: of each row one rank has values."""
    return [next((row for row in rows if row), ()) for rows in zip(*shares, strict=True)]


def _give(workers: Workers, tensors: Mapping[str, Tensor], part: str, counters: Mapping[str, int]) -> None:
    """Have the learners or critics of all workers continue from counters and tensors."""
    path = workers.folder / GIVEN
    write_tensors(path, tensors)
    workers.call("restore", part, counters)
    path.unlink()


def weights_of(workers: Workers) -> dict[str, Tensor]:
    """Return what the first worker samples with."""
    workers.call_one(0, "write_weights")
    return take_tensors(workers.folder / WEIGHTS)


def _parts(workers: Workers) -> dict[str, Tensor]:
    """Return the tensors of which each worker has written its part."""
    paths = (workers.folder / PART.format(rank=rank) for rank in range(workers.size))
    return {name: tensor for path in paths for name, tensor in take_tensors(path).items()}
