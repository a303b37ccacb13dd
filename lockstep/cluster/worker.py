"""A worker that trains: a whole model, its learner and its engine, and the methods that the driver calls on it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.algorithms.build import build_objective
from lockstep.build.build import build_policy, build_weight_sync
from lockstep.checkpoint.state import WeightsFile, read_tensors, write_tensors
from lockstep.cluster.channel import Channel
from lockstep.cluster.messages import GIVEN, PART, WEIGHTS, Facts, RankProof
from lockstep.cluster.sampler import Sampler
from lockstep.device import keep_objects
from lockstep.learner.critic import TorchCritic, build_critic
from lockstep.learner.learner import TorchLearner
from lockstep.learner.protocol import Share
from lockstep.learner.ranks import TorchRanks
from lockstep.learner.sharded import ShardedOptimizer
from lockstep.learner.value_head import CriticShare
from lockstep.noise.targets import find_targets
from lockstep.sync.fingerprint import Fingerprints, TensorPrint
from lockstep.sync.transports import SharedSync
from lockstep.types import Batch, Proof, TokenIds, TrainSequence

COLLECTIVE_TIMEOUT = timedelta(days=2)
"""The driver waits with deadlines of its own; a second, shorter clock would only hide what it has to say."""


class Worker(Sampler):
    """A rank that trains. `build` comes first."""

    def build(self, recipe: str, weights: bool) -> Facts:
        """Build model, learner and engine, and meet the other ranks. `weights`: a file of the folder replaces the start's."""
        self._prepare(recipe)
        place, backend = self._place, "nccl" if self._device.type == "cuda" else "gloo"
        where = f"file://{place.rendezvous}"
        dist.init_process_group(
            backend, init_method=where, rank=place.rank, world_size=place.size, timeout=COLLECTIVE_TIMEOUT
        )
        self._objective = build_objective(self._recipe)
        full = self._recipe.adapter.kind == "none"
        policy = build_policy(self._recipe, replaced=weights and full and not self._objective.needs_reference)
        reference = (
            copy.deepcopy(policy.model).requires_grad_(False) if self._objective.needs_reference and full else None
        )
        critic = build_critic(policy.model, self._recipe, None, TorchRanks()) if self._objective.needs_values else None
        self._load(policy, weights)
        self._critic = critic
        joint = critic.joint if critic else None
        self._learner = TorchLearner(policy.model, self._recipe, reference, joint, ranks=TorchRanks())
        sync = build_weight_sync(policy, self._recipe)
        assert isinstance(sync, SharedSync)  # the recipe's own check: workers sample with the learner's tensors
        self._sync = sync
        noise = None if self._recipe.noise is None else find_targets(policy.model, self._recipe.noise)
        keep_objects()
        return Facts(self._learner.describe(), policy.numerics, policy.context, policy.chat.stop_ids, noise)

    # --- learner --------------------------------------------------------------------------------------------------
    def update(self, batch: Batch) -> Share:
        """Make this rank's share of an update."""
        return self._learner.update_share(batch, self._objective.loss)

    def response_logprobs(
        self, sequences: list[TrainSequence], temperature: float, reference: bool, prefix: int
    ) -> list[tuple[float, ...]]:
        """Return log-probabilities of responses, () for sequences of other ranks."""
        return self._learner.response_logprobs(sequences, temperature, reference=reference, prefix=prefix)

    def logprobs(self, sequences: list[TokenIds], numeric: str) -> list[tuple[float, ...]]:
        """Return log-probabilities of all sequences."""
        return self._learner.logprobs(sequences, numeric)

    def prepare(self, numeric: str) -> tuple[int, tuple[str, ...]]:
        """Prepare the learner for a numeric."""
        return self._learner.prepare_numerics(numeric)

    def fingerprint(self, frozen: bool, only: list[str]) -> Fingerprints:
        """Return fingerprints of the learner's weights."""
        return self._learner.fingerprint(frozen=frozen, only=only)

    def save(self) -> tuple[WeightsFile, Mapping[str, str], Mapping[str, int]]:
        """Write this rank's part of the optimizer, and as rank 0 the weights; returns the weights' file, texts and counters."""
        state = self._learner.save()
        write_tensors(self._part, state.optimizer)
        if self._place.rank == 0:
            write_tensors(self._folder / WEIGHTS, state.weights)
        return state.file, state.texts, state.counters

    def restore(self, counters: dict[str, int]) -> None:
        """Continue from the optimizer's tensors in the folder: those of all ranks, of which this one takes its own."""
        self._learner.restore(counters, read_tensors(self._folder / GIVEN))

    @property
    def _part(self) -> Path:
        return self._folder / PART.format(rank=self._place.rank)

    # --- critic ---------------------------------------------------------------------------------------------------
    @property
    def critic(self) -> TorchCritic:
        assert self._critic is not None
        return self._critic

    def values(self, sequences: list[TrainSequence], prefix: int) -> list[tuple[float, ...]]:
        """Return values of responses, () for sequences of other ranks."""
        return self.critic.values(sequences, prefix)

    def update_critic(self, batch: Batch) -> CriticShare:
        """Make this rank's share of an update of the critic."""
        return self.critic.update_share(batch)

    def save_critic(self) -> dict[str, int]:
        """Write this rank's part of the critic into the folder; returns the counters."""
        write_tensors(self._part, self.critic.tensors())
        return self.critic.counters()

    def restore_critic(self, counters: dict[str, int]) -> None:
        """Continue from the critic's tensors in the folder: those of all ranks."""
        self.critic.restore(counters, read_tensors(self._folder / GIVEN))

    # --- samplers -------------------------------------------------------------------------------------------------
    def join(self, meet: str) -> str:
        """Open a channel to all samplers; returns a hash of what will travel."""
        self._channel = Channel(f"{meet}_{self._place.rank}", 0, self._place.samplers + 1, self._device)
        return self._layout()

    def give(self) -> None:
        """Send the tensors that this rank owns to all samplers."""
        self._channel.send(self._owned(self._place.rank))

    def probe(self) -> tuple[list[TokenIds], list[tuple[float, ...]], float]:
        """Return the sequences of the probe, the learner's log-probabilities of them, and the tolerance."""
        probe = self._sync.probe
        return list(probe.sequences), self._learner.logprobs(probe.sequences), probe.tolerance

    # --- sync -----------------------------------------------------------------------------------------------------
    def push(self) -> RankProof:
        """Give the engine the learner's version and prove it."""
        return self._rank_proof(self._sync.push(self._learner, self._engine))

    def verify(self) -> RankProof:
        """Prove everything and change nothing."""
        return self._rank_proof(self._sync.verify(self._learner, self._engine))

    def _rank_proof(self, proof: Proof) -> RankProof:
        optimizer = self._learner.optimizer
        truth = optimizer.truth if isinstance(optimizer, ShardedOptimizer) else dict[str, TensorPrint]()
        return RankProof(proof, self._sync.shift, self._sync.fingerprints, truth)
