"""Build a batch from graded groups, and compute an advantage for each token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean

from lockstep.algorithms.build import Objective
from lockstep.algorithms.kl import Estimator, reward_penalties
from lockstep.algorithms.overlong import overlong_penalty
from lockstep.algorithms.samples import by_sample
from lockstep.config.schema import Recipe
from lockstep.types import Batch, FinishReason, Group, Rollout, TokenIds, TrainSequence, count_trained


def make_batch(groups: Sequence[Group], recipe: Recipe, kl_coef: float) -> Batch:
    """Return all samples of a step as one batch, group by group, without advantages yet.

    Sequences without a trained token (unscored, or left out as truncated) carry no loss and count in no denominator. Weights
    are 0 until the batch is split into updates. Each row of an episode is a sequence.
    """
    sequences: list[TrainSequence] = []
    sample = 0
    for index, group in enumerate(groups):
        for rollout in group.rollouts:
            sequences += _sequences(rollout, group.rollouts[0].prompt_ids, recipe, index, sample)
            sample += 1
    return Batch(tuple(sequences), recipe.rollout.temperature, common_prefix(groups), kl_coef)


def _sequences(rollout: Rollout, opening: TokenIds, recipe: Recipe, group: int, sample: int) -> Iterator[TrainSequence]:
    """Yield the rows of a rollout. A row that begins with the group's first prompt shares it; the rest of its own prompt, which
    may hold tokens that an earlier row trains, moves to the response as context.
    """
    learns = learnable(rollout, recipe)
    for number, row in enumerate(rollout.rows):
        head = len(opening) if row.prompt_ids[: len(opening)] == opening else len(row.prompt_ids)
        context = row.prompt_ids[head:]
        ids = context + row.ids
        yield TrainSequence(
            row.prompt_ids[:head],
            ids,
            (False,) * len(context) + row.trained if learns else (False,) * len(ids),
            (0.0,) * len(context) + row.logprobs,
            (0.0,) * len(ids),
            0.0,
            group=group,
            reward=shaped_reward(rollout, recipe),
            turn_rewards=() if number else tuple((t + len(context), part) for t, part in rollout.turn_rewards),
            sample=sample,
            routes=row.routes,
        )


def common_prefix(groups: Sequence[Group]) -> int:
    """Return the number of leading prompt tokens that all samples share, among those that their own prompts share with others.

    Prompts of several tasks may begin with tools or system texts of their own, and so may the rows of an episode.
    """
    size = min((rollout.prefix for group in groups for rollout in group.rollouts), default=0)
    rows = [branch for group in groups for rollout in group.rollouts for branch in rollout.branches]
    size = min([size, *(len(row.prompt_ids) - 1 for row in rows)])
    heads = {group.rollouts[0].prompt_ids[:size] for group in groups if group.rollouts}
    heads |= {row.prompt_ids[:size] for row in rows}
    return next((i for i, column in enumerate(zip(*heads, strict=True)) if len(set(column)) > 1), size)


def learnable(rollout: Rollout, recipe: Recipe) -> bool:
    """Return whether the reply may carry loss: it was scored, and is not truncated in a recipe that leaves such replies out."""
    return rollout.grade.scored and not (recipe.algorithm.overlong.drop_truncated and truncated(rollout))


def truncated(rollout: Rollout) -> bool:
    return rollout.finish is FinishReason.LENGTH


def shaped_reward(rollout: Rollout, recipe: Recipe) -> float | None:
    """Return the reward for credit assignment: the grade's, minus the penalty for a long reply. None is unscored."""
    if rollout.grade.reward is None:
        return None
    overlong = recipe.algorithm.overlong
    return rollout.grade.reward - overlong_penalty(
        rollout.charged, recipe.rollout.max_tokens, buffer=overlong.buffer, penalty=overlong.penalty
    )


def with_advantages(objective: Objective, recipe: Recipe, batch: Batch) -> Batch:
    """Give every trained token its advantage, and its return if there is a critic.

    A truncated reply that is left out of the loss still counts in its group's mean.
    """
    kl, sequences = recipe.algorithm.kl, list(batch.sequences)
    if kl.placement == "reward":
        sequences = [replace(s, penalties=kl_estimates(s, kl.estimator, batch.kl_coef)) for s in sequences]
    if objective.needs_values:  # A reply without a trained token was not shown to the critic.
        sequences = [s if s.values else replace(s, values=(0.0,) * len(s.ids)) for s in sequences]
    return replace(batch, sequences=tuple(objective.credit(sequences)) if sequences else ())


def advantage_rows(groups: Sequence[Group], batch: Batch) -> list[tuple[float, ...]]:
    """Return one number per reply, group by group: the mean advantage of its trained tokens, 0 if it has none."""
    rows = by_sample(batch.sequences)
    means = iter([_mean_advantage([batch.sequences[place] for place in places]) for places in rows])
    return [tuple(next(means) for _ in group.rollouts) for group in groups]


def with_advantage(batch: Batch) -> list[bool]:
    """Return for each reply whether a trained token of it has an advantage that is not 0; their mean may be 0 all the same."""
    rows = [any(compress(sequence.advantages, sequence.trained)) for sequence in batch.sequences]
    return [any(rows[place] for place in places) for places in by_sample(batch.sequences)]


def mean_kl(batch: Batch) -> float | None:
    """Return the mean k1 per trained token from the sampling policy to the reference; None if no sample was compared with it."""
    gaps = [
        old - ref
        for sequence in batch.sequences
        if sequence.ref_logprobs is not None
        for old, ref, trained in zip(_sampled_by(sequence), sequence.ref_logprobs, sequence.trained, strict=True)
        if trained
    ]
    return fmean(gaps) if gaps else None


def _sampled_by(sequence: TrainSequence) -> tuple[float, ...]:
    """Return the log-probabilities of the sampling policy: the learner's own if they were computed, else the engine's."""
    return sequence.rollout_logprobs if sequence.old_logprobs is None else sequence.old_logprobs


def kl_estimates(sequence: TrainSequence, estimator: Estimator, coef: float = 1.0) -> tuple[float, ...]:
    """Return the divergence from the reference per response token, times `coef`, 0 where not trained; empty if not compared."""
    if sequence.ref_logprobs is None:  # it carries no loss
        return ()
    return reward_penalties(
        _sampled_by(sequence), sequence.ref_logprobs, sequence.trained, estimator=estimator, coef=coef
    )


def trained_only(rows: Iterable[tuple[Sequence[float], tuple[bool, ...]]]) -> list[float]:
    """Return the values of trained tokens from rows of values and masks."""
    found: list[float] = []
    for values, trained in rows:
        found += values if count_trained(trained) == len(trained) else compress(values, trained)
    return found


def _mean_advantage(rows: Sequence[TrainSequence]) -> float:
    values = trained_only((row.advantages, row.trained) for row in rows)
    if not values:
        return 0.0
    return values[0] if values.count(values[0]) == len(values) else fmean(values)
