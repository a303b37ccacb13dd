"""Forward passes of a step that come before its first update, each made only if something needs it, over all samples at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from lockstep.algorithms.build import Objective
from lockstep.config.schema import Recipe
from lockstep.learner.learner import with_old_logprobs, with_ref_logprobs
from lockstep.loops.credit import Samples
from lockstep.loops.parts import Parts
from lockstep.types import TrainSequence

Pass: TypeAlias = Callable[[list[TrainSequence]], list[TrainSequence]]


def before_credit(parts: Parts, recipe: Recipe, samples: Samples) -> Samples:
    """Attach what credit assignment reads: values of the critic, and for a KL penalty in the reward both its sides."""
    objective, live = parts.objective, [any(sequence.trained) for sequence in samples.sequences]
    if objective.reference_before_credit:
        if objective.recomputes_old:
            samples = _with(samples, live, _old_pass(parts, recipe, samples.prefix))
        samples = _with(samples, live, _reference_pass(parts, recipe, samples.prefix))
    if parts.critic is not None:
        samples = _with(samples, live, _value_pass(parts, samples.prefix))
    return samples


def before_updates(parts: Parts, recipe: Recipe, samples: Samples) -> Samples:
    """Attach what the loss reads and credit assignment did not: old log-probabilities and the reference's."""
    objective, live = parts.objective, carries_gradient(parts.objective, recipe, samples)
    if objective.reference_before_credit:
        return samples
    if objective.recomputes_old:
        samples = _with(samples, live, _old_pass(parts, recipe, samples.prefix))
    if objective.needs_reference:
        samples = _with(samples, live, _reference_pass(parts, recipe, samples.prefix))
    return samples


def carries_gradient(objective: Objective, recipe: Recipe, samples: Samples) -> list[bool]:
    """Which samples have to go through the learner: not those without a trained token, nor, if the recipe allows to leave them
    out, those whose gradient is known to be zero."""
    drop = recipe.update.drop_zero_advantage and objective.zero_advantage_is_zero_gradient
    return [any(s.trained) and not (drop and not any(s.advantages)) for s in samples.sequences]


def _with(samples: Samples, live: Sequence[bool], fill: Pass) -> Samples:
    """The samples, those that are live as `fill` returns them."""
    filled = iter(fill([s for s, alive in zip(samples.sequences, live, strict=True) if alive]))
    sequences = tuple(next(filled) if alive else s for s, alive in zip(samples.sequences, live, strict=True))
    return replace(samples, sequences=sequences)


def _old_pass(parts: Parts, recipe: Recipe, prefix: int) -> Pass:
    def fill(sequences: list[TrainSequence]) -> list[TrainSequence]:
        logprobs = parts.learner.response_logprobs(sequences, recipe.rollout.temperature, prefix=prefix)
        return with_old_logprobs(sequences, logprobs)

    return fill


def _reference_pass(parts: Parts, recipe: Recipe, prefix: int) -> Pass:
    def fill(sequences: list[TrainSequence]) -> list[TrainSequence]:
        temperature = recipe.rollout.temperature
        logprobs = parts.learner.response_logprobs(sequences, temperature, reference=True, prefix=prefix)
        return with_ref_logprobs(sequences, logprobs)

    return fill


def _value_pass(parts: Parts, prefix: int) -> Pass:
    def fill(sequences: list[TrainSequence]) -> list[TrainSequence]:
        values = parts.critic.values(sequences, prefix) if parts.critic is not None else []
        return [replace(s, values=row) for s, row in zip(sequences, values, strict=True)]

    return fill
