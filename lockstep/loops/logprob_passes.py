"""Forward passes for log-probabilities before a step's first update. Each is made only if a setting needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from lockstep.algorithms.build import Objective
from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.types import Batch, TrainSequence

Pass: TypeAlias = Callable[[list[TrainSequence]], list[TrainSequence]]


def add_values_and_reference(parts: Parts, recipe: Recipe, batch: Batch) -> Batch:
    """Attach the inputs of credit assignment: values of the critic, and both sides of a KL penalty in the reward."""
    objective, live = parts.objective, [any(sequence.trained) for sequence in batch.sequences]
    if objective.reference_before_credit:
        if objective.recomputes_old:
            batch = _with(batch, live, _old_pass(parts, recipe, batch.prefix))
        batch = _with(batch, live, _reference_pass(parts, recipe, batch.prefix))
    if parts.critic is not None:
        batch = _with(batch, live, _value_pass(parts, batch.prefix))
    return batch


def add_old_logprobs(parts: Parts, recipe: Recipe, batch: Batch) -> Batch:
    """Attach the remaining inputs of the loss: old log-probabilities and the reference's."""
    objective, live = parts.objective, carries_gradient(parts.objective, recipe, batch)
    if objective.reference_before_credit:
        return batch
    if objective.recomputes_old:
        batch = _with(batch, live, _old_pass(parts, recipe, batch.prefix))
    if objective.needs_reference:
        batch = _with(batch, live, _reference_pass(parts, recipe, batch.prefix))
    return batch


def carries_gradient(objective: Objective, recipe: Recipe, batch: Batch) -> list[bool]:
    """Return True for each sequence that must go through the learner. Left out are sequences without a trained token and, if
    the recipe allows it, those whose gradient is known to be zero.
    """
    drop = recipe.update.drop_zero_advantage and objective.zero_advantage_is_zero_gradient
    return [any(s.trained) and not (drop and not any(s.advantages)) for s in batch.sequences]


def _with(batch: Batch, live: Sequence[bool], fill: Pass) -> Batch:
    """Return the batch with its live sequences replaced by the result of `fill`."""
    filled = iter(fill([s for s, alive in zip(batch.sequences, live, strict=True) if alive]))
    sequences = tuple(next(filled) if alive else s for s, alive in zip(batch.sequences, live, strict=True))
    return replace(batch, sequences=sequences)


def _old_pass(parts: Parts, recipe: Recipe, prefix: int) -> Pass:
    def fill(sequences: list[TrainSequence]) -> list[TrainSequence]:
        logprobs = parts.learner.response_logprobs(sequences, recipe.rollout.temperature, prefix=prefix)
        return [replace(s, old_logprobs=row) for s, row in zip(sequences, logprobs, strict=True)]

    return fill


def _reference_pass(parts: Parts, recipe: Recipe, prefix: int) -> Pass:
    def fill(sequences: list[TrainSequence]) -> list[TrainSequence]:
        temperature = recipe.rollout.temperature
        logprobs = parts.learner.response_logprobs(sequences, temperature, reference=True, prefix=prefix)
        return [replace(s, ref_logprobs=row) for s, row in zip(sequences, logprobs, strict=True)]

    return fill


def _value_pass(parts: Parts, prefix: int) -> Pass:
    def fill(sequences: list[TrainSequence]) -> list[TrainSequence]:
        values = parts.critic.values(sequences, prefix) if parts.critic is not None else []
        return [replace(s, values=row) for s, row in zip(sequences, values, strict=True)]

    return fill
