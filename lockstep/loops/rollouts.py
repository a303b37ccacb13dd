"""From prompts to graded groups, and from groups to batches. Legend: P prompts, G samples of one prompt, N sequences."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

import numpy as np

from lockstep.algorithms.build import Objective
from lockstep.chat.chat import ChatFormat, check_length
from lockstep.config.schema import Recipe
from lockstep.errors import EngineError, HealthStop
from lockstep.seeds import seed_for
from lockstep.types import (
    Batch,
    Completion,
    FinishReason,
    Group,
    Metrics,
    Prompt,
    Request,
    Rollout,
    RolloutEngine,
    Sampling,
    Task,
    TrainSequence,
)


def sampling_of(recipe: Recipe) -> Sampling:
    """How training samples are drawn."""
    r = recipe.rollout
    return Sampling(r.max_tokens, r.temperature, r.top_k, r.top_p, r.min_p, tuple(r.stop), r.ignore_eos)


def sample_groups(
    engine: RolloutEngine, chat: ChatFormat, prompts: Sequence[Prompt], recipe: Recipe, step: int, version: int
) -> list[list[Completion]]:
    """One list of completions per prompt, samples in order. A sample is a function of (run, step, prompt, sample)."""
    sampling = sampling_of(recipe)
    requests = []
    for prompt in prompts:
        ids = chat.render_prompt(prompt)
        for sample in range(recipe.samples_per_prompt):
            seed = seed_for(recipe.seed, "rollout", step, prompt.id, sample)
            name = f"{step}/{prompt.id}/{sample}"
            requests.append(Request(name, ids, prompt.id, seed, sampling, version, chat.shared_prefix(ids)))
    engine.submit(requests)
    done = {completion.request.id: completion for completion in engine.completed()}
    if missing := [request.id for request in requests if request.id not in done]:
        raise EngineError(f"{len(missing)} requests were never completed", where=missing[0])
    return [[done[f"{step}/{prompt.id}/{sample}"] for sample in range(recipe.samples_per_prompt)] for prompt in prompts]


def check_prompts(chat: ChatFormat, prompts: Sequence[Prompt], max_tokens: int, context: int | None) -> None:
    """Raise ChatError for a prompt that leaves no room for a reply."""
    for prompt in prompts:
        tokens = len(chat.render_prompt(prompt))
        if context is not None:
            check_length(prompt.id, tokens, max_tokens, context)


def grade_groups(
    task: Task, chat: ChatFormat, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
) -> list[Group]:
    """Decode and grade; ids are kept as they were sampled."""

    def rollout(prompt: Prompt, sample: int, done: Completion) -> Rollout:
        text = chat.decode(done.ids)
        trained, grade = (True,) * len(done.ids), task.grade(prompt, text)
        ids, prompt_ids = done.ids, done.request.prompt_ids
        return Rollout(
            prompt,
            prompt_ids,
            ids,
            done.logprobs,
            trained,
            text,
            done.finish,
            done.version,
            grade,
            sample,
            done.request.prefix,
        )

    return [
        Group(prompt, tuple(rollout(prompt, sample, done) for sample, done in enumerate(row)))
        for prompt, row in zip(prompts, completions, strict=True)
    ]


def group_advantages(groups: Sequence[Group], objective: Objective) -> list[tuple[float, ...]]:
    """One advantage per rollout, group by group."""
    return [objective.advantages([rollout.grade.reward for rollout in group.rollouts]) for group in groups]


def make_batches(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    objective: Objective,
    recipe: Recipe,
    epoch_step: int,
) -> list[Batch]:
    """The optimizer updates of one pass over a step's samples.

    With several updates, samples are dealt by a permutation that is a function of (run, step and epoch). Unscored samples
    are left out of the loss and of its denominators.
    """
    rollouts = [
        (index, rollout, advantage)
        for index, (group, row) in enumerate(zip(groups, advantages, strict=True))
        for rollout, advantage in zip(group.rollouts, row, strict=True)
    ]
    per_update = recipe.samples_per_update
    order = list(range(len(rollouts)))
    if per_update < len(rollouts):
        order = sorted(order, key=lambda i: seed_for(recipe.seed, "update", epoch_step, i))
    return [
        _batch([rollouts[i] for i in order[start : start + per_update]], objective, recipe)
        for start in range(0, len(order), per_update)
    ]


def _batch(rollouts: Sequence[tuple[int, Rollout, float]], objective: Objective, recipe: Recipe) -> Batch:
    tokens_N = [sum(r.trained) if r.grade.scored else 0 for _, r, _ in rollouts]
    weights_N = objective.weights(tokens_N, [index for index, _, _ in rollouts])
    drop = recipe.update.drop_zero_advantage and objective.zero_advantage_is_zero_gradient
    sequences = tuple(
        TrainSequence(r.prompt_ids, r.ids, r.trained, r.logprobs, (a,) * len(r.ids), weight, group=index)
        for (index, r, a), weight in zip(rollouts, weights_N, strict=True)
        if weight and not (drop and a == 0.0)
    )
    prefix = min((r.prefix for _, r, _ in rollouts), default=0)
    return Batch(sequences, recipe.rollout.temperature, prefix)


def rollout_metrics(groups: Sequence[Group], advantages: Sequence[Sequence[float]], recipe: Recipe) -> Metrics:
    """What the samples of a step look like. Names as in docs/metrics.md."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.ids) for rollout in rollouts]
    flat = [advantage for row in advantages for advantage in row]
    unscored = sum(not rollout.grade.scored for rollout in rollouts) / len(rollouts)
    metrics: Metrics = {
        "reward/unscored": unscored,
        "reward/zero_std_groups": fmean(not any(row) for row in advantages),
        "advantage/mean": fmean(flat),
        "advantage/std": pstdev(flat),
        "advantage/min": min(flat),
        "advantage/max": max(flat),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated": fmean(rollout.finish is FinishReason.LENGTH for rollout in rollouts),
        "batch/prompts": float(len(groups)),
        "batch/samples": float(len(rollouts)),
        "batch/tokens_generated": float(sum(lengths)),
        "batch/optimizer_steps": float(recipe.updates_per_step),
    }
    return metrics | _reward_metrics(rollouts)


def _reward_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    rewards = [r.grade.reward for r in rollouts if r.grade.reward is not None]
    if not rewards:
        return {}
    metrics: Metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/p90": float(np.quantile(rewards, 0.9)),
    }
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.grade.metrics.items():
            values.setdefault(f"answer/{name}", []).append(float(value))
        if rollout.prompt.task and rollout.grade.reward is not None:
            values.setdefault(f"task/{rollout.prompt.task}/reward", []).append(rollout.grade.reward)
    return metrics | {name: fmean(column) for name, column in values.items()}


def check_scored(groups: Sequence[Group], recipe: Recipe, step: int) -> str:
    """A warning if too many replies could not be scored; raises HealthStop above the limit."""
    failed = [r for group in groups for r in group.rollouts if not r.grade.scored]
    share = len(failed) / sum(len(group.rollouts) for group in groups)
    if share <= recipe.health.warn_unscored:
        return ""
    first = failed[0]
    text = f"{len(failed)} replies ({share:.1%}) could not be scored; the first, {first.prompt.id}: {first.grade.error}"
    if share > recipe.health.max_unscored:
        raise HealthStop(text, where=f"step {step}", fix="mend the verifier; health.max_unscored sets the limit")
    return text
