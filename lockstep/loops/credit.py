"""From graded groups to sequences with an advantage for each token. Legend: T response tokens, N samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lockstep.algorithms.build import Objective
from lockstep.algorithms.kl import Estimator, reward_penalties
from lockstep.algorithms.overlong import overlong_penalty
from lockstep.config.schema import Recipe
from lockstep.types import Credit, Episode, FinishReason, Group, Rollout, TrainSequence


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of a step on their way to the learner, group by group."""

    sequences: tuple[TrainSequence, ...]
    """Those without a trained token (unscored, or left out as truncated) carry no loss and count in no denominator. Weights
    are 0 until the samples are dealt into updates."""
    prefix: int
    """Leading prompt tokens that all of them have."""
    kl_coef: float
    """Weight of the KL penalty in this step."""


def train_samples(groups: Sequence[Group], recipe: Recipe, kl_coef: float) -> Samples:
    """The samples of the groups, without advantages yet."""
    sequences = tuple(
        TrainSequence(
            rollout.prompt_ids,
            rollout.ids,
            rollout.trained if learnable(rollout, recipe) else (False,) * len(rollout.ids),
            rollout.logprobs,
            (0.0,) * len(rollout.ids),
            0.0,
            group=index,
        )
        for index, group in enumerate(groups)
        for rollout in group.rollouts
    )
    return Samples(sequences, common_prefix(groups), kl_coef)


def common_prefix(groups: Sequence[Group]) -> int:
    """How many leading prompt tokens all samples have in common, of those that their own prompts share with others.

    Prompts of several tasks may begin with tools or system texts of their own.
    """
    size = min((rollout.prefix for group in groups for rollout in group.rollouts), default=0)
    heads = {group.rollouts[0].prompt_ids[:size] for group in groups if group.rollouts}
    return next((i for i, column in enumerate(zip(*heads, strict=True)) if len(set(column)) > 1), size)


def learnable(rollout: Rollout, recipe: Recipe) -> bool:
    """Whether the reply may carry loss: it was scored, and was not cut off in a recipe that leaves such replies out."""
    return rollout.grade.scored and not (recipe.algorithm.overlong.drop_truncated and truncated(rollout))


def truncated(rollout: Rollout) -> bool:
    return rollout.finish is FinishReason.LENGTH


def shaped_reward(rollout: Rollout, recipe: Recipe) -> float | None:
    """The reward as credit assignment sees it: the grade's, less the penalty for a long reply. None is unscored."""
    if rollout.grade.reward is None:
        return None
    overlong, tokens = recipe.algorithm.overlong, len(rollout.ids)
    return rollout.grade.reward - overlong_penalty(
        tokens, recipe.rollout.max_tokens, buffer=overlong.buffer, penalty=overlong.penalty
    )


def assign_credit(objective: Objective, recipe: Recipe, groups: Sequence[Group], samples: Samples) -> Samples:
    """Give every trained token its advantage, and its return if there is a critic.

    A truncated reply that is left out of the loss still counts in its group's mean.
    """
    rollouts, kl = [rollout for group in groups for rollout in group.rollouts], recipe.algorithm.kl
    episodes = [
        Episode(
            sequence.group,
            shaped_reward(rollout, recipe),
            sequence.trained,
            kl_estimates(sequence, kl.estimator, samples.kl_coef) if kl.placement == "reward" else (),
            sequence.values or ((0.0,) * len(sequence.ids) if objective.needs_values else ()),
            rollout.turn_rewards,
        )
        for rollout, sequence in zip(rollouts, samples.sequences, strict=True)
    ]
    credits: list[Credit] = objective.credit(episodes) if episodes else []
    sequences = tuple(
        replace(sequence, advantages=credit.advantages, returns=credit.returns or None)
        for sequence, credit in zip(samples.sequences, credits, strict=True)
    )
    return replace(samples, sequences=sequences)


def advantage_rows(groups: Sequence[Group], samples: Samples) -> list[tuple[float, ...]]:
    """One number per reply, group by group: the mean advantage of its trained tokens, 0 if it has none."""
    means = iter([_mean_advantage(sequence) for sequence in samples.sequences])
    return [tuple(next(means) for _ in group.rollouts) for group in groups]


def mean_kl(samples: Samples) -> float | None:
    """Mean k1 per trained token of the policy that sampled to the reference; None if no sample was compared with it."""
    gaps = [
        old - ref
        for sequence in samples.sequences
        if sequence.ref_logprobs is not None
        for old, ref, trained in zip(_sampled_by(sequence), sequence.ref_logprobs, sequence.trained, strict=True)
        if trained
    ]
    return fmean(gaps) if gaps else None


def _sampled_by(sequence: TrainSequence) -> tuple[float, ...]:
    """Log-probabilities of the policy that sampled: the learner's own if they were computed, else the engine's."""
    return sequence.rollout_logprobs if sequence.old_logprobs is None else sequence.old_logprobs


def kl_estimates(sequence: TrainSequence, estimator: Estimator, coef: float = 1.0) -> tuple[float, ...]:
    """Divergence from the reference per response token, times `coef`, 0 where not trained; empty if it was not compared."""
    if sequence.ref_logprobs is None:  # it carries no loss
        return ()
    return reward_penalties(
        _sampled_by(sequence), sequence.ref_logprobs, sequence.trained, estimator=estimator, coef=coef
    )


def _mean_advantage(sequence: TrainSequence) -> float:
    values = [value for value, trained in zip(sequence.advantages, sequence.trained, strict=True) if trained]
    if not values:
        return 0.0
    return values[0] if min(values) == max(values) else fmean(values)
