"""A worker that trains: a whole model, its learner and its engine, and the methods that the driver calls on it or on these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lockstep.algorithms.build import build_objective
from lockstep.build.build import build_trained, build_weight_sync
from lockstep.checkpoint.state import WeightsFile, read_tensors, write_tensors
from lockstep.cluster.sampler import Facts, Sampler
from lockstep.cluster.wire import PART, WEIGHTS
from lockstep.device import keep_objects
from lockstep.learner.critic import TorchCritic
from lockstep.learner.learner import TorchLearner
from lockstep.learner.ranks import TorchRanks
from lockstep.learner.sharded import ShardedOptimizer
from lockstep.noise.targets import find_targets
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.sync.compare import RankProof
from lockstep.sync.fingerprint import TensorPrint
from lockstep.types import Batch, NativeRollouts, Proof, TrainSequence

COLLECTIVE_TIMEOUT = timedelta(days=2)
"""The driver waits with deadlines of its own; a second, shorter clock would only hide what it has to say."""
_OTHER = TrainSequence((), (), (), (), (), 0.0, 0)
"""Stands for a sequence that another rank trains on."""


class Worker(Sampler):
    """A rank that trains. `build` comes first."""

    learner: TorchLearner
    critic: TorchCritic
    """There is none if the recipe has none."""

    def build(self, recipe: str, weights: bool) -> Facts:
        """Build model, learner and engine, and meet the other ranks. `weights`: a file of the folder replaces the start's."""
        self._prepare(recipe)
        place, backend = self._place, "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{place.rendezvous}", COLLECTIVE_TIMEOUT, place.size, place.rank)
        self._objective = build_objective(self._recipe)
        self._part = self._folder / PART.format(rank=place.rank)
        given = read_tensors(self._given) if weights else None
        policy, engine, self.learner, critic = build_trained(self._recipe, self._objective, given, ranks=TorchRanks())
        if critic is not None:
            self.critic = critic
        self._serve_from(policy, engine)
        self._sync = build_weight_sync(policy, self._recipe)
        noise = None if self._recipe.noise is None else find_targets(policy.model, self._recipe.noise)
        keep_objects()
        return Facts(self.learner.describe(), policy.numerics, policy.context, policy.chat.stop_ids, noise)

    # --- learner and critic ---------------------------------------------------------------------------------------
    def train(self, batch: Batch, places: list[int], number: int, dealt: int) -> None:
        """Do this rank's part of a round. `batch` has its sequences alone, which are those at `places` in the whole batch."""
        own = dict(zip(places, batch.sequences, strict=True))
        whole = tuple(own.get(place, _OTHER) for place in range(max(places, default=-1) + 1))
        if isinstance(self.engine, NativeRollouts):
            self.engine.forget()  # all episodes have ended, and an update needs the memory
        self.learner.train_round(replace(batch, sequences=whole), self._objective.loss, places, number, dealt)

    def save(self) -> tuple[WeightsFile, Mapping[str, str], Mapping[str, int]]:
        """Write this rank's part of the optimizer, and as rank 0 the weights; returns the weights' file, texts and counters."""
        state = self.learner.save()
        write_tensors(self._part, state.optimizer)
        if self._place.rank == 0:
            write_tensors(self._folder / WEIGHTS, state.weights)
        return state.file, state.texts, state.counters

    def restore(self, part: str, counters: dict[str, int]) -> None:
        """Have the learner or the critic continue from the tensors in the folder. It takes its own of those of all ranks."""
        getattr(self, part).restore(counters, read_tensors(self._given))

    def write_critic(self) -> None:
        """Write this rank's part of the critic into the folder."""
        write_tensors(self._part, self.critic.tensors())

    # --- sync -----------------------------------------------------------------------------------------------------
    def push(self) -> RankProof:
        """Give the engine the learner's version and prove it."""
        return self._rank_proof(self._sync.push(self.learner, self.engine))

    def refresh(self) -> None:
        """Make what the next rollout would make first of the new weights."""
        if isinstance(self.engine, PagedEngine):
            self.engine.refresh()

    def verify(self) -> RankProof:
        """Prove everything and change nothing."""
        return self._rank_proof(self._sync.verify(self.learner, self.engine))

    def _rank_proof(self, proof: Proof) -> RankProof:
        optimizer = self.learner.optimizer
        truth = optimizer.truth if isinstance(optimizer, ShardedOptimizer) else dict[str, TensorPrint]()
        return RankProof(proof, self._sync.shift, self._sync.fingerprints, truth)
