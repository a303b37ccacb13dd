"""The learner: forward passes over packed streams, the loss, and the optimizer step, on one CPU or GPU.

Legend: T tokens of the stream, R tokens with loss, N sequences, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import Recipe
from lockstep.errors import LearnerError
from lockstep.learner.optimizer import MasterAdamW, learning_rate
from lockstep.learner.packing import Packed, as_sequence, microbatches, pack
from lockstep.learner.statistics import UpdateStatistics
from lockstep.models.attention import require_attention_only
from lockstep.models.heads import Head, head_of, token_logprobs
from lockstep.models.weights import clean_name, named_weights
from lockstep.types import Batch, Loss, LossInput, Metrics, TokenIds, TrainSequence, WeightStream

STREAM_MULTIPLE = 16
"""Streams are padded to a multiple of this many tokens, which matrix kernels prefer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the learner needs of the recipe."""

    tokens_per_microbatch: int
    share_prompts: bool
    optimizer_steps: int
    """Of the whole run, for the schedule."""
    peak_lr: float
    max_skipped: int

    @staticmethod
    def of(recipe: Recipe) -> Plan:
        update = recipe.update
        steps = recipe.steps * recipe.updates_per_step
        return Plan(update.tokens_per_microbatch, update.share_prompts, steps, recipe.lr, update.max_skipped)


class TorchLearner:
    """Implements types.Learner over a transformers model, or a PEFT model around one, loaded with Lockstep's attention."""

    def __init__(self, model: nn.Module, recipe: Recipe, reference: nn.Module | None = None) -> None:
        """`reference` is a frozen copy for the KL penalty; with adapters none is needed, the base is the reference."""
        self.version = 0
        self.model = model
        self.optimizer_step = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._settings, self._plan, self._reference = recipe.optimizer, Plan.of(recipe), reference
        base = base_model(model)
        require_attention_only(base)
        if recipe.update.recompute:
            _recompute_layers(base)
        self._device = next(base.parameters()).device
        self.trainable = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise LearnerError(
                "no parameter is trained", fix="choose an adapter or train all weights (adapter.kind: none)"
            )
        self.optimizer = MasterAdamW(self.trainable, recipe.optimizer)

    # --- Learner --------------------------------------------------------------------------------------------------
    def logprobs(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Log-probability of every token but the first of each sequence, at temperature 1."""
        plain = [as_sequence(ids, group) for group, ids in enumerate(sequences)]
        return self.response_logprobs(plain, 1.0)

    def response_logprobs(
        self, sequences: Sequence[TrainSequence], temperature: float, *, reference: bool = False, prefix: int = 0
    ) -> list[tuple[float, ...]]:
        """Log-probability of each response token (0 where not trained), under the policy or the reference model."""
        result: list[tuple[float, ...]] = [()] * len(sequences)
        with torch.no_grad(), self._as_reference() if reference else nullcontext(self.model) as model:
            for packed, chosen in self._packed(sequences, prefix):
                logprobs_R, _ = _forward(model, packed, temperature)
                values = iter(logprobs_R.tolist())
                for sequence in chosen:
                    trained = sequences[sequence].trained
                    result[sequence] = tuple(next(values) if t else 0.0 for t in trained)
        return result

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step on a batch, in as many micro-batches as the token budget needs.

        The gradient is that of Σ_i weight_i Σ_t loss_it, so that the split does not matter. Raises LearnerError after too
        many steps in a row with a non-finite gradient; such a step leaves every weight as it was.
        """
        statistics = UpdateStatistics()
        for packed, _ in self._packed(batch.sequences, batch.prefix):
            self._backward(packed, batch, loss, statistics)
        lr = learning_rate(self._settings, self._plan.peak_lr, self.optimizer_step, self._plan.optimizer_steps)
        outcome = self.optimizer.step(lr)
        self.optimizer_step += 1
        self._count_skip(outcome.skipped, outcome.norm)
        self.version += 1
        return statistics.metrics() | {
            "grad/norm": outcome.norm,
            "grad/clipped": float(outcome.clipped),
            "grad/skipped": float(self.skipped),
            "lr": lr,
        }

    def weights(self) -> WeightStream:
        return named_weights(self.model)

    # --- state ----------------------------------------------------------------------------------------------------
    def counters(self) -> dict[str, int]:
        return {
            "version": self.version,
            "optimizer_step": self.optimizer_step,
            "skipped": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def restore(self, counters: Mapping[str, int], optimizer: Mapping[str, Tensor]) -> None:
        """Continue where `counters` and the optimizer's tensors were saved. The weights are loaded beforehand."""
        self.optimizer.restore(optimizer)
        self.version, self.optimizer_step = counters["version"], counters["optimizer_step"]
        self.skipped, self._skipped_in_a_row = counters["skipped"], counters["skipped_in_a_row"]

    # --- inner ----------------------------------------------------------------------------------------------------
    def _packed(self, sequences: Sequence[TrainSequence], prefix: int = 0) -> Iterator[tuple[Packed, list[int]]]:
        share, budget = self._plan.share_prompts, self._plan.tokens_per_microbatch
        for chosen in microbatches(sequences, budget, share_prompts=share, prefix=prefix):
            yield pack(sequences, chosen, share_prompts=share, device=self._device, prefix=prefix), chosen

    def _backward(self, packed: Packed, batch: Batch, loss: Loss, statistics: UpdateStatistics) -> None:
        sequences = [batch.sequences[i] for i in packed.order]
        logprobs_R, entropy_R = _forward(self.model, packed, batch.temperature)
        if not logprobs_R.numel():
            return
        inputs = _loss_input(sequences, packed, logprobs_R, entropy_R)
        output = loss(inputs)
        weight_R = _per_token(sequences, [[s.weight] * len(s.ids) for s in sequences], logprobs_R)
        total = (weight_R * output.loss_T).sum()
        total.backward()
        statistics.add(inputs, output, float(total.detach()), packed.tokens)

    def _count_skip(self, skipped: bool, norm: float) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self.skipped += skipped
        if self._skipped_in_a_row >= self._plan.max_skipped:
            raise LearnerError(
                f"{self._skipped_in_a_row} steps in a row were skipped: the gradient norm is {norm}",
                where=f"optimizer step {self.optimizer_step}",
                fix="lower optimizer.lr, or train in fp32 (model.dtype); the weights are those before the first of them",
            )

    def _as_reference(self) -> Any:
        """The reference model as a context: the frozen copy, or the base with its adapters off."""
        if self._reference is not None:
            return nullcontext(self._reference)
        if not hasattr(self.model, "disable_adapter"):
            raise LearnerError("there is no reference model", where="algorithm.kl", fix="build the learner with one")
        return _adapters_off(self.model)


class _adapters_off:
    def __init__(self, model: Any) -> None:
        self._model, self._context = model, model.disable_adapter()

    def __enter__(self) -> nn.Module:
        self._context.__enter__()
        return self._model  # type: ignore[no-any-return]

    def __exit__(self, *failure: Any) -> None:
        self._context.__exit__(*failure)


def base_model(model: nn.Module) -> Any:
    """The transformers model, without PEFT around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _recompute_layers(base: Any) -> None:
    """Have each decoder layer compute its activations again in the backward pass."""
    base.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in base.modules():
        # transformers recomputes in training mode alone. Only the layer's own flag is set: no dropout, which sits inside, wakes.
        if getattr(layer, "gradient_checkpointing", False):
            layer.training = True


def _forward(model: nn.Module, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the tokens with loss, [R] each, fp32."""
    base = base_model(model)
    padding = -packed.tokens % STREAM_MULTIPLE
    ids_1T = nn.functional.pad(packed.ids_T, (0, padding))[None]
    positions_1T = nn.functional.pad(packed.positions_T, (0, padding))[None]
    output = base.get_decoder()(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, layout=packed.layout)
    hidden_RH = output.last_hidden_state[0].index_select(0, packed.rows_R)
    head: Head = head_of(base)
    return token_logprobs(head, hidden_RH, packed.targets_R, temperature)


def _loss_input(sequences: Sequence[TrainSequence], packed: Packed, logprobs_R: Tensor, entropy_R: Tensor) -> LossInput:
    rollout_R = _per_token(sequences, [s.rollout_logprobs for s in sequences], logprobs_R)
    old_R = logprobs_R.detach()
    if sequences[0].old_logprobs is not None:
        old_R = _per_token(sequences, [s.old_logprobs or () for s in sequences], logprobs_R)
    ref_R = None
    if sequences[0].ref_logprobs is not None:
        ref_R = _per_token(sequences, [s.ref_logprobs or () for s in sequences], logprobs_R)
    advantages_R = _per_token(sequences, [s.advantages for s in sequences], logprobs_R)
    return LossInput(logprobs_R, old_R, rollout_R, advantages_R, entropy_R, packed.sequence_R, len(sequences), ref_R)


def _per_token(sequences: Sequence[TrainSequence], values: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Per-token lists of all sequences, tokens without loss left out, as a tensor like `like`."""
    kept = chain.from_iterable(
        (value for value, trained in zip(row, s.trained, strict=True) if trained)
        for row, s in zip(values, sequences, strict=True)
    )
    return torch.tensor(list(kept), dtype=like.dtype, device=like.device)


def with_old_logprobs(sequences: Sequence[TrainSequence], logprobs: Sequence[tuple[float, ...]]) -> list[TrainSequence]:
    """Fix the denominator of the ratio before the first of several updates."""
    return [replace(s, old_logprobs=values) for s, values in zip(sequences, logprobs, strict=True)]


def with_ref_logprobs(sequences: Sequence[TrainSequence], logprobs: Sequence[tuple[float, ...]]) -> list[TrainSequence]:
    """Attach the reference model's log-probabilities."""
    return [replace(s, ref_logprobs=values) for s, values in zip(sequences, logprobs, strict=True)]
