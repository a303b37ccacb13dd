"""The learner: forward passes over packed streams, the loss, and the optimizer step, on one CPU or GPU.

Legend: T tokens of the stream, R tokens with loss, N sequences, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.schema import Recipe
from lockstep.errors import LearnerError
from lockstep.learner.adapter_files import saved_tensors, saved_texts
from lockstep.learner.adapters import as_reference, describe, facts_of
from lockstep.learner.execution import Execution, execution_of
from lockstep.learner.oom import memory_for_step, run_or_halve, score_or_halve
from lockstep.learner.optimizer import MasterOptimizer
from lockstep.learner.packing import Packed, as_sequence, loss_input, microbatches, number_tokens, pack, streams
from lockstep.learner.protocol import LearnerState, Share, scored_by, update_metrics
from lockstep.learner.ranks import Ranks, deal
from lockstep.learner.recompute import recomputing, set_recompute
from lockstep.learner.schedule import learning_rate
from lockstep.learner.sharded import ShardedOptimizer, build_optimizer
from lockstep.learner.statistics import UpdateStatistics
from lockstep.models import exact
from lockstep.models.attention import prepare_layers
from lockstep.models.fused_layers import fuse_layers
from lockstep.models.heads import Head, head_of, token_logprobs
from lockstep.models.host import on_device
from lockstep.models.merged_weights import merged_of
from lockstep.models.routing import Routing, follow_routes
from lockstep.models.weights import clean_name, frozen_names, named_weights
from lockstep.noise.apply import require_clean
from lockstep.numerics.apply import settle
from lockstep.sync.fingerprint import Fingerprints, fingerprint
from lockstep.types import Batch, LearnerFacts, Loss, Metrics, Scored, TokenIds, TrainSequence, WeightStream

if TYPE_CHECKING:
    from lockstep.learner.value_head import ValueTraining

STREAM_MULTIPLE = 16
"""Streams are padded to a multiple of this many tokens, which matrix kernels prefer."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The learner's settings from the recipe."""

    share_prompts: bool
    optimizer_steps: int
    """Optimizer steps of the whole run, for the schedule."""
    peak_lr: float
    max_skipped: int

    @staticmethod
    def of(recipe: Recipe) -> UpdatePlan:
        update = recipe.update
        return UpdatePlan(update.share_prompts, recipe.policy_updates, recipe.lr, update.max_skipped)


class TorchLearner:
    """Implements types.Learner over a transformers model, or a PEFT model around one, loaded with Lockstep's attention."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        reference: nn.Module | None = None,
        value: ValueTraining | None = None,
        plan: Execution | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Take the model. `reference` is a frozen copy for the KL penalty; with adapters none is needed, the base is the
        reference.

        `value` is TorchCritic.joint: a value head on this model's own hidden states, whose loss joins each update. `plan` is
        the memory plan's choice for settings that the recipe leaves open. With `ranks` the learners of all ranks train
        together: each is called with the same arguments and does its share of the micro-batches.
        """
        self.version = 0
        self._ranks = ranks
        self.model = model
        self.optimizer_step = 0
        self.skipped = 0
        self.scored: tuple[Scored, ...] = ()
        self._skipped_in_a_row = 0
        self._settings, self._plan, self._reference = recipe.optimizer, UpdatePlan.of(recipe), reference
        self._adapter = recipe.adapter
        self._value = value
        base = base_model(model)
        prepare_layers(base)
        self._device = next(base.parameters()).device
        self.execution = execution_of(recipe.update, self._device, plan)
        self.notes: tuple[str, ...] = ()
        """Lines for the log."""
        if self._device.type == "cuda":
            if reference is not None:
                fuse_layers(base_model(reference))
            update = (
                f"{self.execution.tokens_per_microbatch} tokens per micro-batch, recompute {self.execution.recompute}"
            )
            self.notes = (fuse_layers(base).line, update)
        self._routing = Routing.of(base) if recipe.update.replay_routing else None
        if exact.line():
            self.notes = (*self.notes, exact.line())
        set_recompute(base.get_decoder(), self.execution.recompute)
        self.numerics, self._merged = settle(model, recipe.numerics), merged_of(model)
        if reference is not None:
            settle(reference, recipe.numerics)
        self.trainable = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            fix = "choose an adapter, or train all weights with adapter.kind=none"
            raise LearnerError("no parameter of the model is trained", fix=fix)
        self.optimizer = build_optimizer(self.trainable, recipe.optimizer, ranks)
        if self.optimizer.note:
            self.notes = (*self.notes, self.optimizer.note)

    # --- Learner --------------------------------------------------------------------------------------------------
    def logprobs(self, sequences: Sequence[TokenIds], numeric: str = "") -> list[tuple[float, ...]]:
        """Return the log-probability of every token but the first of each sequence, at temperature 1, for proofs of sync.

        It uses the precision of the weights unless a numeric is named: under quantised activations two correct computations
        differ by more than two versions of the weights do otherwise (docs/numerics.md).
        """
        require_clean(self.model, "logprobs")
        self.numerics.serve(numeric)
        with self.numerics.computing(numeric):
            return plain_logprobs(self.model, sequences, self.execution.tokens_per_microbatch)

    def response_logprobs(
        self, sequences: Sequence[TrainSequence], temperature: float, *, reference: bool = False, prefix: int = 0
    ) -> list[tuple[float, ...]]:
        """Return the log-probability of each response token (0 where not trained), under the policy or the reference model.

        One of several ranks returns () for the sequences of the others.
        """
        require_clean(self.model, "response_logprobs")

        def repack(chosen: Sequence[int]) -> Packed:
            return self._pack(sequences, chosen, prefix)

        with torch.no_grad(), self._as_reference() if reference else nullcontext(self.model) as model:

            def score(packed: Packed) -> Tensor:
                return score_or_halve(packed, lambda part: _logprobs(model, part, temperature), repack)

            return number_tokens(sequences, self._streams(sequences, prefix), score)

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step on a batch, in as many micro-batches as the token budget needs.

        The gradient is that of Σ_i weight_i Σ_t loss_it, so the split has no effect on it. Raises LearnerError after too many
        steps in a row with a non-finite gradient; such a step changes no weight.
        """
        share = self.update_share(batch, loss)
        self.scored = scored_by([share])
        return update_metrics([share])

    def update_share(self, batch: Batch, loss: Loss) -> Share:
        """Make this rank's share of an update; of a single rank that is all of it."""
        self.begin_update()
        rank, size = self._place
        for number, dealt in enumerate(deal(self._chunks(batch.sequences, batch.prefix), size)):
            own = dealt[rank] if rank < len(dealt) else ()
            self.train_round(batch, loss, own, number * size + rank, len(dealt))
        return self.finish_update()

    def begin_update(self) -> None:
        """Begin an update. Rounds of micro-batches and `finish_update` follow, on all ranks in the same order."""
        require_clean(self.model, "an update")
        self._statistics = UpdateStatistics()
        self.optimizer.forget()  # left by an update that failed between its micro-batches
        if self._value is not None:
            self._value.forget()

    def train_round(self, batch: Batch, loss: Loss, own: Sequence[int], number: int, dealt: int) -> None:
        """Train on this rank's micro-batch of a round of `dealt` ones: the sequences at `own`; there may be none.

        `number`: its place in the update. Other sequences of the batch are not read.
        """
        if own:
            packed = self._pack(batch.sequences, own, batch.prefix)
            self._statistics.begin(number)
            if self._value is not None:
                self._value.begin(number)
            self._train(packed, batch, loss)
        for optimizer in self._optimizers:
            optimizer.exchange(dealt)

    def finish_update(self) -> Share:
        """Make the optimizer step of the rounds since `begin_update`; returns this rank's share of the update."""
        lr = learning_rate(self._settings, self._plan.peak_lr, self.optimizer_step, self._plan.optimizer_steps)
        with memory_for_step(f"optimizer step {self.optimizer_step}"):
            outcome = self.optimizer.step(lr)
        self.numerics.changed()
        for merged in self._merged:
            merged.forget()
        self.optimizer_step += 1
        self._count_skip(outcome.skipped, outcome.norm)
        self.version += 1
        critic, pieces = None if self._value is None else self._value.step(), self._statistics.pieces()
        return Share(pieces, outcome.norm, outcome.clipped, self.skipped, lr, self._statistics.splits, critic)

    def weights(self) -> WeightStream:
        """Return the live weights. Raises EngineError while an engine's noise is on them."""
        require_clean(self.model, "the learner's weights")
        return named_weights(self.model)

    # --- state ----------------------------------------------------------------------------------------------------
    def describe(self) -> LearnerFacts:
        """Return facts for the log and the manifest."""
        facts = facts_of(self.model)
        lines = (*describe(self._adapter, self.model).splitlines(), *self.notes)
        trained = sum(parameter.numel() for parameter in self.trainable.values())
        base, tokens = facts.base.fingerprint if facts else "", self.execution.tokens_per_microbatch
        return LearnerFacts(str(self._device), lines, base, trained, tokens, self._plan.share_prompts)

    def prepare_numerics(self, numeric: str) -> tuple[int, tuple[str, ...]]:
        """Prepare for a numeric; returns the number of quantised layers, and the names of those left alone."""
        return self.numerics.prepare(numeric), tuple(self.numerics.excluded)

    def fingerprint(self, *, frozen: bool = False, only: Collection[str] = ()) -> Fingerprints:
        """Return fingerprints of all weights, of those that training must not change, or of `only` these."""
        names = frozen_names(self.model) if frozen else frozenset(only) or None
        return fingerprint((n, w) for n, w in self.weights() if names is None or n in names)

    def save(self) -> LearnerState:
        """Return the content of a checkpoint as live tensors: read them before the next update."""
        facts = facts_of(self.model)
        counters = {
            "version": self.version,
            "optimizer_step": self.optimizer_step,
            "skipped": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }
        optimizer = self.optimizer.tensors()
        if facts is None:
            weights = {n: t for n, t in self.weights() if not n.endswith(".lora_scaling")}
            return LearnerState("model.safetensors", weights, {}, optimizer, counters)
        texts = saved_texts(self.model, self._adapter, facts.base)
        return LearnerState("adapter_model.safetensors", saved_tensors(self.model), texts, optimizer, counters)

    def restore(self, counters: Mapping[str, int], optimizer: Mapping[str, Tensor]) -> None:
        """Continue where `counters` and the optimizer's tensors were saved. The weights must be loaded before."""
        self.optimizer.restore(optimizer)
        self.version, self.optimizer_step = counters["version"], counters["optimizer_step"]
        self.skipped, self._skipped_in_a_row = counters["skipped"], counters["skipped_in_a_row"]

    # --- inner ----------------------------------------------------------------------------------------------------
    @property
    def _place(self) -> tuple[int, int]:
        """Rank of this learner, and the number of ranks."""
        return (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)

    @property
    def _optimizers(self) -> list[MasterOptimizer | ShardedOptimizer]:
        return [self.optimizer, *([self._value.optimizer] if self._value else [])]

    def _chunks(self, sequences: Sequence[TrainSequence], prefix: int) -> list[list[int]]:
        """Return the micro-batches of all ranks."""
        share, budget = self._plan.share_prompts, self.execution.tokens_per_microbatch
        return microbatches(sequences, budget, share_prompts=share, prefix=prefix)

    def _streams(self, sequences: Sequence[TrainSequence], prefix: int = 0) -> Iterator[Packed]:
        """Yield this rank's micro-batches."""
        rank, size = self._place
        for chosen in self._chunks(sequences, prefix)[rank::size]:
            yield self._pack(sequences, chosen, prefix)

    def _pack(self, sequences: Sequence[TrainSequence], chosen: Sequence[int], prefix: int) -> Packed:
        row, share = None if self._routing is None else self._routing.row, self._plan.share_prompts
        return pack(sequences, chosen, share_prompts=share, device=self._device, prefix=prefix, row=row)

    def _train(self, packed: Packed, batch: Batch, loss: Loss) -> None:
        """Run the forward and backward pass of a micro-batch, in halves if it does not fit."""
        for optimizer in self._optimizers:
            optimizer.collected.clear()

        def run(part: Packed) -> None:
            self._backward(part, batch, loss)

        def repack(chosen: Sequence[int]) -> Packed:
            return self._pack(batch.sequences, chosen, batch.prefix)

        with exact.repeated():
            halves = run_or_halve(packed, run, repack, lambda: [p for o in self._optimizers for p in o.collected])
        self._statistics.splits += halves

    def _backward(self, packed: Packed, batch: Batch, loss: Loss) -> None:
        sequences = [batch.sequences[i] for i in packed.order]
        entropy = not batch.supervised
        logprobs_R, entropy_R, hidden_RH = _forward(self.model, packed, batch.temperature, entropy=entropy)
        if not logprobs_R.numel():
            return
        inputs = loss_input(sequences, packed, logprobs_R, entropy_R, batch)
        output = loss(inputs)
        if self._routing is not None:
            differ, total = self._routing.differing()
            share_R = (differ / total.clamp(min=1)).expand_as(logprobs_R)
            output = replace(output, means={**output.means, "routes/differ": share_R})
        weight_N = on_device(np.array([s.weight for s in sequences]), self._device).to(logprobs_R.dtype)
        policy = (weight_N[packed.sequence_R] * output.loss_T).sum()
        value = None if self._value is None else self._value.loss(hidden_RH, sequences)
        total = policy if value is None else policy + value.loss
        if total.requires_grad:
            for optimizer in self._optimizers:
                optimizer.before_backward()
            total.backward()
        self._statistics.add(inputs, output, policy.detach(), packed.tokens)
        if self._value is not None and value is not None:
            self._value.record(value)

    def _count_skip(self, skipped: bool, norm: float) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self.skipped += skipped
        if self._skipped_in_a_row >= self._plan.max_skipped:
            raise LearnerError(
                f"{self._skipped_in_a_row} steps in a row were skipped: the gradient norm is {norm}",
                where=f"optimizer step {self.optimizer_step}",
                fix="lower optimizer.lr, or set model.dtype=fp32; the skipped steps have not changed the weights",
            )

    def _as_reference(self) -> Any:
        """Return the reference model as a context: the frozen copy, or the base without its trained adapters."""
        if self._reference is not None:
            return nullcontext(self._reference)
        if not hasattr(self.model, "disable_adapter"):
            what = "the KL penalty needs a reference model, but there is none"
            raise LearnerError(what, where="algorithm.kl", fix="build the learner with a reference model")
        return as_reference(self.model)


def base_model(model: nn.Module) -> Any:
    """Return the transformers model, without PEFT around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def hidden_states(decoder: Any, packed: Packed) -> Tensor:
    """Return final hidden states of a transformers decoder, [R, H]: those that predict the tokens with loss."""
    padding = -packed.tokens % (exact.STREAM_MULTIPLE if exact.enabled() else STREAM_MULTIPLE)
    ids_1T = nn.functional.pad(packed.ids_T, (0, padding))[None]
    positions_1T = nn.functional.pad(packed.positions_T, (0, padding))[None]
    with recomputing(decoder):
        output = decoder(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, layout=packed.layout)
    hidden_RH: Tensor = output.last_hidden_state.squeeze(0).index_select(0, packed.rows_R)
    return hidden_RH


def _forward(
    model: nn.Module, packed: Packed, temperature: float, *, entropy: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability and entropy of the tokens with loss, fp32 [R] each, and their hidden states [R, H].

    Without `entropy` the second is empty.
    """
    base = base_model(model)
    follow_routes(base, packed.routes_TX)
    hidden_RH = hidden_states(base.get_decoder(), packed)
    head: Head = head_of(base)
    return *token_logprobs(head, hidden_RH, packed.targets_R, temperature, entropy=entropy), hidden_RH


def _logprobs(model: nn.Module, packed: Packed, temperature: float) -> Tensor:
    return _forward(model, packed, temperature, entropy=False)[0]


def plain_logprobs(
    model: nn.Module, sequences: Sequence[TokenIds], tokens_per_microbatch: int
) -> list[tuple[float, ...]]:
    """Return log-probabilities of all tokens but each sequence's first, at temperature 1, by training's forward pass."""
    plain = [as_sequence(ids, group) for group, ids in enumerate(sequences)]
    device = next(base_model(model).parameters()).device
    packed_streams = streams(plain, tokens_per_microbatch, share_prompts=False, device=device)

    def repack(chosen: Sequence[int]) -> Packed:
        return pack(plain, chosen, share_prompts=False, device=device)

    def score(packed: Packed) -> Tensor:
        return score_or_halve(packed, lambda part: _logprobs(model, part, 1.0), repack)

    with torch.no_grad():
        return number_tokens(plain, packed_streams, score)
