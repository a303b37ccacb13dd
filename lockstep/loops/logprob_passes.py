"""Forward passes for log-probabilities before a step's first update. Each is made only if a setting needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from lockstep.algorithms.build import Objective
from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.types import Batch, TrainSequence


def add_values_and_reference(parts: Parts, recipe: Recipe, batch: Batch) -> Batch:
    """Attach the inputs of credit assignment: values of the critic, and both sides of a KL penalty in the reward."""
    live = [any(sequence.trained) for sequence in batch.sequences]
    if parts.objective.reference_before_credit:
        batch = _with_logprobs(parts, recipe, batch, live)
    if parts.critic is not None:
        batch = _with(batch, live, "values", parts.critic.values(_chosen(batch, live), batch.prefix))
    return batch


def add_old_logprobs(parts: Parts, recipe: Recipe, batch: Batch) -> Batch:
    """Attach the remaining inputs of the loss: old log-probabilities and the reference's."""
    if parts.objective.reference_before_credit:
        return batch
    return _with_logprobs(parts, recipe, batch, carries_gradient(parts.objective, recipe, batch))


def carries_gradient(objective: Objective, recipe: Recipe, batch: Batch) -> list[bool]:
    """Return True for each sequence that must go through the learner. Left out are sequences without a trained token and, if
    the recipe allows it, those whose gradient is known to be zero.
    """
    drop = recipe.update.drop_zero_advantage and objective.zero_advantage_is_zero_gradient
    return [any(s.trained) and not (drop and not any(s.advantages)) for s in batch.sequences]


def _with_logprobs(parts: Parts, recipe: Recipe, batch: Batch, live: Sequence[bool]) -> Batch:
    """Attach the log-probabilities that the objective needs: those before the update, and the reference's."""
    chosen, temperature = _chosen(batch, live), recipe.rollout.temperature
    if parts.objective.recomputes_old:
        rows = parts.learner.response_logprobs(chosen, temperature, prefix=batch.prefix)
        batch = _with(batch, live, "old_logprobs", rows)
    if parts.objective.needs_reference:
        rows = parts.learner.response_logprobs(chosen, temperature, reference=True, prefix=batch.prefix)
        batch = _with(batch, live, "ref_logprobs", rows)
    return batch


def _chosen(batch: Batch, live: Sequence[bool]) -> list[TrainSequence]:
    return [s for s, alive in zip(batch.sequences, live, strict=True) if alive]


def _with(
    batch: Batch,
    live: Sequence[bool],
    name: Literal["old_logprobs", "ref_logprobs", "values"],
    rows: Sequence[tuple[float, ...]],
) -> Batch:
    """Return the batch whose live sequences have these rows under `name`."""
    found = iter(rows)
    sequences = []
    for sequence, alive in zip(batch.sequences, live, strict=True):
        new: dict[str, Any] = {name: next(found)} if alive else {}
        sequences.append(replace(sequence, **new))
    return replace(batch, sequences=tuple(sequences))
