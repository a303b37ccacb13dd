"""The playbook of `lockstep diagnose`: what to look at, in this order, and what to do about it. Its limits come from notes of
earlier GRPO runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from lockstep.health.trends import WIDTH, change

LATEST = 10
"""Steps that "lately" means."""

Statistic: TypeAlias = Literal["lately", "growth", "peak"]
"""lately: the median of the last steps; growth: lately over the mean of the first steps; peak: the largest
over the median."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A number that points to an entry of the playbook."""

    metric: str
    statistic: Statistic
    side: Literal["above", "below"]
    limit: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to look at: any of its signs is enough."""

    name: str
    signs: tuple[Sign, ...]
    action: str
    if_flat: bool = False
    """Only where the reward has not risen."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An entry whose signs are there."""

    entry: Entry
    evidence: tuple[str, ...]


PLAYBOOK: tuple[Entry, ...] = (
    Entry(
        "no improvement 1: the weights do not move",
        (Sign("weights/changed_tensors", "lately", "below", 0.5), Sign("grad/norm", "lately", "below", 1e-12)),
        "raise optimizer.lr, unfreeze the trained parameters (adapter.targets), and look at the loss",
        if_flat=True,
    ),
    Entry(
        "no improvement 2: the updates are too small to learn from",
        (Sign("sync/probe_shift", "lately", "below", 1e-5),),
        "shorten optimizer.warmup_steps, raise optimizer.lr; `lockstep plan` shows the rate by step",
        if_flat=True,
    ),
    Entry(
        "no improvement 3: replies to a prompt do not differ in reward",
        (Sign("reward/zero_std_groups", "lately", "above", 0.5), Sign("advantage/std", "lately", "below", 0.05)),
        "change the difficulty until 20 to 60 % are right, take more samples a prompt, or turn dynamic_sampling on",
        if_flat=True,
    ),
    Entry(
        "no improvement 4: the grader does not find the answers",
        (
            Sign("answer/has_answer", "lately", "below", 0.9),
            Sign("answer/boxed", "lately", "below", 0.9),
            Sign("reward/unscored", "lately", "above", 0.01),
        ),
        "read wrong replies (`lockstep rollouts RUN --step N --wrong`); show the format by chat.examples or a short SFT",
        if_flat=True,
    ),
    Entry(
        "no improvement 5: engine and learner disagree",
        (Sign("mismatch/mean_abs_dlogp", "lately", "above", 0.03), Sign("mismatch/k3", "lately", "above", 2e-3)),
        "look at rollout.top_p, top_k and min_p, template, temperature, dtype and numerics, in this order",
        if_flat=True,
    ),
    Entry(
        "no improvement 6: the clip range stops the updates",
        (Sign("ratio/clip_share", "lately", "above", 0.2),),
        "lower optimizer.lr, or take fewer updates a rollout (update.epochs, update.samples_per_update)",
        if_flat=True,
    ),
    Entry(
        "instability",
        (
            Sign("ratio/clip_share", "lately", "above", 0.4),
            Sign("sync/probe_shift", "lately", "above", 0.5),
            Sign("entropy/sampled", "growth", "above", 3.0),
            Sign("entropy/sampled", "growth", "below", 0.1),
            Sign("kl/ref", "lately", "above", 0.1),
        ),
        "lower optimizer.lr two- to ten-fold, raise algorithm.kl.coef, or go back to the best checkpoint",
    ),
    Entry(
        "reward hacking",
        (Sign("reward/high_but_wrong", "lately", "above", 0.05),),
        "read high-reward replies that are wrong, and let no part of the reward outweigh the answer",
    ),
    Entry(
        "spikes of 100 times and more",
        (Sign("grad/norm", "peak", "above", 100.0),),
        "filter the rows that `lockstep diagnose` names, tighten the clip range, lower optimizer.lr",
    ),
    Entry(
        "spikes of 3 to 100 times",
        (Sign("grad/norm", "peak", "above", 3.0),),
        "harmless while they pass; if they grow by decade, lower optimizer.lr. Ratios cause them more often than advantages do",
    ),
    Entry(
        "length collapse",
        (Sign("length/mean", "growth", "below", 0.5),),
        "does the grader reward an answer without its derivation? Compare length/mean with the reward",
    ),
    Entry(
        "truncation",
        (Sign("length/truncated", "lately", "above", 0.7),),
        "raise rollout.max_tokens, or ask for shorter replies",
    ),
)


def findings(rows: Sequence[Mapping[str, float]]) -> list[Finding]:
    """Return the entries that a run's steps point to, in the order of the playbook; nothing of fewer steps than `WIDTH`."""
    if len(rows) < WIDTH:
        return []
    flat, found = not improves(rows), []
    for entry in PLAYBOOK:
        evidence = tuple(text for sign in entry.signs if (text := seen(sign, rows)))
        if evidence and (flat or not entry.if_flat):
            found.append(Finding(entry, evidence))
    largest = {"spikes of 100 times and more"} & {one.entry.name for one in found}
    return [one for one in found if not (largest and one.entry.name == "spikes of 3 to 100 times")]


def improves(rows: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the reward of the last steps is more than two standard errors above that of the first."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if len(rewards) < 2 * WIDTH:
        return True  # too early to call it flat
    rise, error = change(rewards)
    return rise > 2 * error


def seen(sign: Sign, rows: Sequence[Mapping[str, float]]) -> str:
    """Return the evidence of a sign, "" if it is not there or cannot be told."""
    values = [row[sign.metric] for row in rows if math.isfinite(row.get(sign.metric, math.nan))]
    if not values:
        return ""
    value = statistic(sign.statistic, values)
    if value is None or not (value > sign.limit if sign.side == "above" else value < sign.limit):
        return ""
    forms = {
        "lately": f"{value:.4g} lately",
        "growth": f"{value:.3g} times its start",
        "peak": f"{value:.3g} times its median at most",
    }
    return f"{sign.metric} {forms[sign.statistic]} ({sign.side} {sign.limit:g})"


def statistic(kind: Statistic, values: Sequence[float]) -> float | None:
    """Return the number that a sign looks at; None if its base is 0."""
    match kind:
        case "lately":
            return statistics.median(values[-LATEST:])
        case "growth":
            start = statistics.fmean(values[:WIDTH])
            return statistics.median(values[-LATEST:]) / start if start > 0 else None
        case "peak":
            usual = statistics.median(values)
            return max(values) / usual if usual > 0 else None
        case _:
            assert_never(kind)
