"""Metrics of a step's samples. Their names are listed in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, pstdev

import numpy as np

from lockstep.config.schema import Recipe
from lockstep.loops.advantages import kl_estimates, shaped_reward, trained_only, truncated, with_advantage
from lockstep.track.writer import StepRecord
from lockstep.types import Batch, Group, Metrics, Rollout, count_trained


def rollout_metrics(groups: Sequence[Group], recipe: Recipe) -> Metrics:
    """Return metrics of all replies of a step, whether they are trained on or not."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.sampled for rollout in rollouts]  # sampled tokens only: observations are not the policy's
    metrics: Metrics = {
        "reward/unscored": fmean(not rollout.grade.scored for rollout in rollouts),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated": fmean(truncated(rollout) for rollout in rollouts),
        "batch/samples": float(len(rollouts)),
        "batch/tokens_generated": float(sum(lengths)),
    }
    if compared := [group for group in groups if recipe.algorithm.compares_in_group and len(group.rollouts) > 1]:
        metrics["reward/zero_std_groups"] = fmean(_all_equal(group, recipe) for group in compared)
    return metrics | _reward_metrics(rollouts) | _surprise(rollouts) | _overlong_metrics(rollouts, recipe)


def credit_metrics(groups: Sequence[Group], rows: Sequence[Sequence[float]], batch: Batch, recipe: Recipe) -> Metrics:
    """Return metrics of the trained samples and their targets. `rows` are the mean advantages of the groups' replies."""
    flat = [advantage for row in rows for advantage in row]
    metrics: Metrics = {"batch/prompts": float(len(groups))}
    if recipe.algorithm.kl.coef > 0:
        metrics["kl/coef"] = batch.kl_coef
    metrics["advantage/nonzero"] = fmean(with_advantage(batch)) if flat else 0.0
    if not flat:
        return metrics
    metrics |= {
        "advantage/mean": fmean(flat),
        "advantage/std": pstdev(flat),
        "advantage/min": min(flat),
        "advantage/max": max(flat),
    }
    if recipe.algorithm.overlong.drop_truncated:
        dropped = [truncated(rollout) and rollout.grade.scored for group in groups for rollout in group.rollouts]
        metrics["length/dropped"] = float(sum(dropped))
    return metrics | _penalty_metrics(batch, recipe)


def grading_line(rows: Sequence[StepRecord]) -> str:
    """Return the share of time that grading added to the steps of a run; "" if none was graded.

    Example: "grading added 0.3% to a step (median of 40, at most 0.9%)"
    """
    shares = [row.metrics["time/grade_share"] for row in rows if "time/grade_share" in row.metrics]
    if not shares:
        return ""
    return f"grading added {median(shares):.1%} to a step (median of {len(shares)}, at most {max(shares):.1%})"


def _all_equal(group: Group, recipe: Recipe) -> bool:
    """Return whether all rewards of a group are equal, as the advantages see them: after the overlong penalty."""
    return len({shaped_reward(rollout, recipe) for rollout in group.rollouts if rollout.grade.scored}) < 2


def _surprise(rollouts: Sequence[Rollout]) -> Metrics:
    rows = [row for rollout in rollouts for row in rollout.rows]
    count = sum(count_trained(row.trained) for row in rows)
    total = sum(sum(trained_only([(row.logprobs, row.trained)])) for row in rows)
    return {"entropy/sampled": -total / count} if count else {}


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
    if (share := _high_but_wrong(rollouts)) is not None:
        metrics["reward/high_but_wrong"] = share
    values: dict[str, list[float]] = {}
    tasks = {rollout.prompt.task for rollout in rollouts}
    for rollout in rollouts:
        for name, value in rollout.grade.metrics.items():
            values.setdefault(f"answer/{name}", []).append(float(value))
        if rollout.prompt.task and rollout.grade.reward is not None:
            values.setdefault(f"task/{rollout.prompt.task}/reward", []).append(rollout.grade.reward)
            if len(tasks) > 1 and "correct" in rollout.grade.metrics:
                values.setdefault(f"task/{rollout.prompt.task}/correct", []).append(rollout.grade.metrics["correct"])
    for name, column in values.items():
        metrics |= {name: fmean(column)} | (_spread(name, column) if name.startswith("answer/") else {})
    return metrics


def _spread(name: str, values: Sequence[float]) -> Metrics:
    """Return the extremes and the 90th percentile of a verifier's number; of a yes or no the mean says all."""
    if set(values) <= {0.0, 1.0}:
        return {}
    return {f"{name}/min": min(values), f"{name}/p90": float(np.quantile(values, 0.9)), f"{name}/max": max(values)}


def _high_but_wrong(rollouts: Sequence[Rollout]) -> float | None:
    """Return the share of replies that are wrong and got at least the least reward of a right one; None without a right one."""
    graded = [
        (rollout.grade.reward, rollout.grade.metrics["correct"] >= 1)
        for rollout in rollouts
        if rollout.grade.reward is not None and "correct" in rollout.grade.metrics
    ]
    right = [reward for reward, correct in graded if correct]
    return fmean(not correct and reward >= min(right) for reward, correct in graded) if right else None


def _overlong_metrics(rollouts: Sequence[Rollout], recipe: Recipe) -> Metrics:
    shaped = [reward for rollout in rollouts if (reward := shaped_reward(rollout, recipe)) is not None]
    return {"reward/shaped_mean": fmean(shaped)} if shaped and recipe.algorithm.overlong.buffer else {}


def _penalty_metrics(batch: Batch, recipe: Recipe) -> Metrics:
    """Return the divergence that was subtracted from the rewards; a penalty in the loss is reported by the update."""
    settings = recipe.algorithm.kl
    compared = [sequence for sequence in batch.sequences if sequence.ref_logprobs is not None]
    if settings.placement == "loss" or not compared:
        return {}
    total = sum(sum(kl_estimates(sequence, settings.estimator)) for sequence in compared)
    return {"kl/ref": total / sum(sum(sequence.trained) for sequence in compared)}
