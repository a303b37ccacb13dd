"""A worker that trains: a whole model, its learner and its engine, and the methods that the driver calls on it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.algorithms.build import build_objective
from lockstep.build.build import build_policy, build_weight_sync
from lockstep.checkpoint.state import read_tensors, write_tensors
from lockstep.cluster.channel import Channel
from lockstep.cluster.messages import (
    CRITIC,
    OPTIMIZER,
    PART,
    WEIGHTS,
    Facts,
    Numerics,
    Plain,
    Prints,
    RankProof,
    Rows,
    Saved,
    Values,
)
from lockstep.cluster.plain import from_plain, many_from_plain, to_plain
from lockstep.cluster.sampler import Sampler
from lockstep.device import keep_objects
from lockstep.learner.critic import TorchCritic, build_critic
from lockstep.learner.learner import TorchLearner
from lockstep.learner.protocol import Share
from lockstep.learner.ranks import TorchRanks
from lockstep.learner.sharded import ShardedOptimizer
from lockstep.learner.value_head import CriticShare
from lockstep.noise.targets import find_targets
from lockstep.sync import record
from lockstep.sync.fingerprint import TensorPrint
from lockstep.sync.transports import SharedSync
from lockstep.types import Batch, Proof, TrainSequence

COLLECTIVE_TIMEOUT = timedelta(days=2)
"""The driver waits with deadlines of its own; a second, shorter clock would only hide what it has to say."""


class Worker(Sampler):
    """A rank that trains. `build` comes first."""

    def build(self, recipe: str, weights: bool) -> Plain:
        """Build model, learner and engine, and meet the other ranks. `weights`: a file of the folder replaces the start's.

        Returns Facts.
        """
        self._prepare(recipe)
        place, backend = self._place, "nccl" if self._device.type == "cuda" else "gloo"
        where = f"file://{place.rendezvous}"
        dist.init_process_group(
            backend, init_method=where, rank=place.rank, world_size=place.size, timeout=COLLECTIVE_TIMEOUT
        )
        self._objective = build_objective(self._recipe)
        full = self._recipe.adapter.kind == "none"
        policy = build_policy(self._here, replaced=weights and full and not self._objective.needs_reference)
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
        facts = Facts(self._learner.describe(), policy.numerics, policy.context, policy.chat.stop_ids, noise)
        keep_objects()
        return to_plain(Facts, facts)

    # --- learner --------------------------------------------------------------------------------------------------
    def update(self, batch: Plain) -> Plain:
        """Make this rank's share of an update; returns a Share."""
        share = self._learner.update_share(from_plain(Batch, batch), self._objective.loss)
        return to_plain(Share, share)

    def response_logprobs(self, sequences: Plain, temperature: float, reference: bool, prefix: int) -> Plain:
        """Return Values, empty for sequences of other ranks."""
        found = self._learner.response_logprobs(
            many_from_plain(TrainSequence, sequences), temperature, reference=reference, prefix=prefix
        )
        return to_plain(Values, Values(tuple(found)))

    def logprobs(self, sequences: Plain, numeric: str) -> Plain:
        """Return Values of all sequences."""
        found = self._learner.logprobs(from_plain(Rows, sequences).ids, numeric)
        return to_plain(Values, Values(tuple(found)))

    def prepare(self, numeric: str) -> Plain:
        """Prepare the learner for a numeric; returns Numerics."""
        return to_plain(Numerics, Numerics(*self._learner.prepare_numerics(numeric)))

    def fingerprint(self, frozen: bool, only: list[str]) -> Plain:
        """Return Prints of the learner's weights."""
        return to_plain(Prints, self._learner.fingerprint(frozen=frozen, only=only).tensors)

    def save(self) -> Plain:
        """Write this rank's part of the optimizer, and as rank 0 the weights, into the folder; returns Saved."""
        state, folder = self._learner.save(), Path(self._place.folder)
        write_tensors(folder / PART.format(rank=self._place.rank), state.optimizer)
        if self._place.rank == 0:
            write_tensors(folder / WEIGHTS, state.weights)
        return to_plain(Saved, Saved(state.file, state.texts, state.counters))

    def restore(self, counters: dict[str, int]) -> None:
        """Continue from the optimizer's tensors in the folder: those of all ranks, of which this one takes its own."""
        self._learner.restore(counters, read_tensors(Path(self._place.folder) / OPTIMIZER))

    # --- critic ---------------------------------------------------------------------------------------------------
    @property
    def critic(self) -> TorchCritic:
        assert self._critic is not None
        return self._critic

    def values(self, sequences: Plain, prefix: int) -> Plain:
        """Return Values of the critic, empty for sequences of other ranks."""
        return to_plain(Values, Values(tuple(self.critic.values(many_from_plain(TrainSequence, sequences), prefix))))

    def update_critic(self, batch: Plain) -> Plain:
        """Make this rank's share of an update of the critic; returns a CriticShare."""
        return to_plain(CriticShare, self.critic.update_share(from_plain(Batch, batch)))

    def save_critic(self) -> dict[str, int]:
        """Write this rank's part of the critic into the folder; returns the counters."""
        write_tensors(Path(self._place.folder) / CRITIC.format(rank=self._place.rank), self.critic.tensors())
        return self.critic.counters()

    def restore_critic(self, counters: dict[str, int]) -> None:
        """Continue from the critic's tensors in the folder: those of all ranks."""
        self.critic.restore(counters, read_tensors(Path(self._place.folder) / OPTIMIZER))

    # --- samplers -------------------------------------------------------------------------------------------------
    def join(self, meet: str) -> str:
        """Open a channel to all samplers; returns a hash of what will travel."""
        self._channel = Channel(f"{meet}_{self._place.rank}", 0, self._place.samplers + 1, self._device)
        return self._layout()

    def give(self) -> None:
        """Send the tensors that this rank owns to all samplers."""
        self._channel.send(self._owned(self._place.rank))

    def probe(self) -> Plain:
        """Return the sequences of the probe as Rows, the learner's Values of them, and the tolerance."""
        probe = self._sync.probe
        ours = Values(tuple(self._learner.logprobs(probe.sequences)))
        return [to_plain(Rows, Rows(probe.sequences)), to_plain(Values, ours), probe.tolerance]

    # --- sync -----------------------------------------------------------------------------------------------------
    def push(self) -> Plain:
        """Give the engine the learner's version and prove it; returns a RankProof."""
        return self._rank_proof(self._sync.push(self._learner, self._engine))

    def verify(self) -> Plain:
        """Prove everything and change nothing; returns a RankProof."""
        return self._rank_proof(self._sync.verify(self._learner, self._engine))

    def _rank_proof(self, proof: Proof) -> Plain:
        optimizer = self._learner.optimizer
        return rank_proof(proof, self._sync, optimizer.truth if isinstance(optimizer, ShardedOptimizer) else {})


def rank_proof(proof: Proof, sync: SharedSync, truth: Mapping[str, TensorPrint]) -> Plain:
    """Return a RankProof of a worker's own proof. `truth`: of the tensors that it owns, made before any other rank got them."""
    text = json.dumps(record.to_json(proof), allow_nan=False)
    return to_plain(RankProof, RankProof(text, sync.shift, sync.fingerprints.tensors, truth))
