"""Turn graded groups into new weights: advantages, then the optimizer updates of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lockstep.algorithms.build import Objective
from lockstep.algorithms.samples import by_sample
from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.health.spikes import SpikeLog
from lockstep.loops.advantages import advantage_rows, make_batch, mean_kl, with_advantages
from lockstep.loops.logprob_passes import add_old_logprobs, add_values_and_reference, carries_gradient
from lockstep.loops.step_metrics import credit_metrics
from lockstep.loops.token_log import TokenLog
from lockstep.seeds import seed_for
from lockstep.types import Batch, Group, Metrics, count_trained

AT_FIRST = ("mismatch/", "critic/explained_variance")
"""Prefixes of metrics that hold before the first update of a step; for later updates they would measure something else."""
SUMMED = ("batch/", "critic/oom_splits")
LOWEST = ("ratio/log_min",)
WORST = ("ratio/", "correction/weight_max", "grad/norm", "grad/clipped", "critic/grad_norm")


def improve(
    parts: Parts,
    recipe: Recipe,
    groups: Sequence[Group],
    step: int,
    spikes: SpikeLog | None = None,
    tokens: TokenLog | None = None,
) -> tuple[list[tuple[float, ...]], Metrics]:
    """Update the weights from graded groups. Returns an advantage per reply, group by group, and the metrics.

    Without a group the weights stay unchanged, and the step is counted as empty. `spikes` keeps updates that stand out,
    `tokens` the learner's numbers for each token.
    """
    batch = make_batch(groups, recipe, parts.carried.kl_coef)
    batch = add_values_and_reference(parts, recipe, batch)
    batch = with_advantages(parts.objective, recipe, batch)
    if not warms_up(recipe, step):
        batch = add_old_logprobs(parts, recipe, batch)
    rows = parts.meanwhile.later(partial(advantage_rows, groups, batch))
    credit = parts.meanwhile.later(lambda: credit_metrics(groups, rows(), batch, recipe))
    metrics = run_updates(parts, recipe, batch, step, spikes, tokens)
    if spikes is not None:
        spikes.settle(step + 1, groups)
    return rows(), credit() | metrics | carry_on(parts, recipe, batch)


def carry_on(parts: Parts, recipe: Recipe, batch: Batch) -> Metrics:
    """Set the state that the next step inherits besides the weights; returns the metrics that decide it."""
    metrics: Metrics = {}
    if not batch.sequences:
        parts.carried.empty_steps += 1
    if recipe.algorithm.dynamic_sampling.enabled:
        metrics["sampling/empty_steps"] = float(parts.carried.empty_steps)
    kl = mean_kl(batch)
    if kl is not None:
        parts.carried.adapt_kl(recipe, kl, len(by_sample(batch.sequences)))
        metrics["kl/k1"] = kl
    return metrics


def run_updates(
    parts: Parts,
    recipe: Recipe,
    whole: Batch,
    step: int,
    spikes: SpikeLog | None = None,
    tokens: TokenLog | None = None,
) -> Metrics:
    """Make all optimizer updates of a step, of the policy and of the critic. Without samples there is none."""
    epochs, skipped = recipe.update.epochs, parts.learner.skipped
    live = carries_gradient(parts.objective, recipe, whole)
    batches = [
        batch
        for epoch in range(epochs)
        for batch in make_batches(parts.objective, recipe, whole, live, step * epochs + epoch)
    ]
    trains_policy = not warms_up(recipe, step)
    metrics: Metrics = {}
    for batch in batches:
        metrics = merged(metrics, _update(parts, batch, spikes, tokens, policy=trains_policy))
    updates = len(batches) if trains_policy else 0
    return metrics | {
        "batch/samples_trained": float(sum(any(live[index] for index in rows) for rows in by_sample(whole.sequences))),
        "batch/optimizer_steps": float(updates - (parts.learner.skipped - skipped)),
    }


def warms_up(recipe: Recipe, step: int) -> bool:
    """Return whether only the critic is trained in this step."""
    return step < recipe.critic_steps


def _update(parts: Parts, batch: Batch, spikes: SpikeLog | None, tokens: TokenLog | None, *, policy: bool) -> Metrics:
    critic, metrics = parts.critic, Metrics()
    if policy:
        metrics = parts.learner.update(batch, parts.objective.loss)
        metrics |= spikes.after(batch, metrics, parts.learner.scored) if spikes else {}
        if tokens is not None:
            tokens.after(batch, parts.learner.scored)
    if critic is not None and not (policy and critic.joint):  # a shared one was trained by the learner's update
        metrics |= critic.update(batch)
    return metrics


def make_batches(
    objective: Objective, recipe: Recipe, whole: Batch, live: Sequence[bool], epoch_step: int
) -> list[Batch]:
    """Split one pass over the samples into updates; samples that are not `live` count in denominators only.

    With several updates, samples are dealt by a permutation that is a function of (run, step and epoch). All rows of a sample
    are in one update.
    """
    samples = by_sample(whole.sequences)
    count, size = len(samples), recipe.samples_per_update
    order = list(range(count))
    if size < count:
        order = sorted(order, key=lambda index: seed_for(recipe.seed, "update", epoch_step, index))
    return [
        _batch(objective, recipe, whole, live, [samples[index] for index in order[start : start + size]])
        for start in range(0, count, size)
    ]


def _batch(
    objective: Objective, recipe: Recipe, whole: Batch, live: Sequence[bool], samples: Sequence[Sequence[int]]
) -> Batch:
    """Return the batch of these samples, whose rows are indices. Rows have the weight of their sample as if they were one."""
    tokens_N = [sum(count_trained(whole.sequences[index].trained) for index in rows) for rows in samples]
    weights_N = objective.weights(tokens_N, [whole.sequences[rows[0]].group for rows in samples])
    in_loss = recipe.algorithm.kl.placement == "loss"  # a penalty in the reward is already part of the advantages
    return Batch(
        tuple(
            replace(whole.sequences[index], weight=weight)
            for rows, weight in zip(samples, weights_N, strict=True)
            for index in rows
            if live[index]
        ),
        whole.temperature,
        whole.prefix,
        whole.kl_coef if in_loss else 0.0,
    )


def merged(before: Metrics, after: Metrics) -> Metrics:
    """Merge metrics of a step's updates: counts add up, tails keep the maximum, AT_FIRST the first value, others the last."""
    result = dict(before)
    for name, value in after.items():
        if name not in before:
            result[name] = value
        elif name.startswith(SUMMED):
            result[name] += value
        elif name.startswith(LOWEST):
            result[name] = float(np.minimum(result[name], value))  # NaN if one is: min() and max() would lose it
        elif name.startswith(WORST):
            result[name] = float(np.maximum(result[name], value))
        elif not name.startswith(AT_FIRST):
            result[name] = value
    return result
