"""Selects the groups that a step trains on: those of its prompts or, with dynamic sampling (DAPO, arXiv 2503.14476, §3.2), only
groups with both right and wrong replies, for which further prompts are drawn in rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.errors import LockstepError
from lockstep.loops.rollouts import check_scored, episode_metrics, first_requests, processed, sample_groups
from lockstep.run.logger import Clock, RunLogger
from lockstep.tasks.mixed import Mixed
from lockstep.types import Forward, Group, Metrics, Prompt, Request, Task

MARGIN = 1.5
"""Factor on the number of prompts that a further round would need at the present acceptance rate; too few cost a round."""


def draw_groups(
    parts: Parts, recipe: Recipe, logger: RunLogger, step: int, clock: Clock
) -> tuple[list[Group], list[int], Metrics]:
    """Sample and grade the groups of a step, in several rounds if dynamic sampling is on and the first was not enough.

    Returns all groups in the order in which they were drawn, the indices of those to train on, and metrics of environments,
    curriculum and dynamic sampling. Raises HealthStop if too many replies could not be scored.
    """
    dynamic = recipe.algorithm.dynamic_sampling
    rounds = dynamic.max_rounds if dynamic.enabled else 1
    groups: list[Group] = []
    kept: list[int] = []
    unscored, before = "", processed(parts.engine)
    for number in range(rounds):
        prompts = step_prompts(parts, recipe, step, number, groups, len(kept))
        groups += sample_groups(parts, recipe, prompts, step, clock)
        unscored = check_scored(groups, recipe, step + 1)
        kept = [index for index, group in enumerate(groups) if not dynamic.enabled or mixed(group)]
        if len(kept) >= recipe.prompts_per_step:
            break
    for warning in (unscored, _shortfall(len(kept), len(groups), recipe)):
        if warning:
            logger.warn(warning, step=step + 1)
    metrics = episode_metrics(groups, parts.engine, before) | take_in(parts, groups)
    if dynamic.enabled:
        metrics |= {
            "sampling/acceptance_rate": len(kept) / len(groups),
            "sampling/rounds": float(number + 1),
            "sampling/prompts_drawn": float(len(groups)),
        }
    return groups, kept[: recipe.prompts_per_step], metrics


def spread(groups: Sequence[Group], kept: Sequence[int], rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Expand rows of the selected groups to rows of all groups, with zeros for the others."""
    row_of = dict(zip(kept, rows, strict=True))
    return [row_of.get(index, (0.0,) * len(group.rollouts)) for index, group in enumerate(groups)]


def step_prompts(
    parts: Parts, recipe: Recipe, step: int, number: int, asked: Sequence[Group], accepted: int
) -> list[Prompt]:
    """Return the prompts of round `number` of a step; with a curriculum they depend on what has been solved before."""
    task, progress = parts.task, parts.carried.progress
    if not isinstance(task, Mixed) or progress is None:
        return round_prompts(task, recipe, step, number, asked, accepted)
    before = {group.prompt.id for group in asked}
    return [prompt for prompt in task.deal(progress, recipe.prompts_per_step) if prompt.id not in before]


def prepare_rollouts(parts: Parts, recipe: Recipe, step: int, *, follows: bool) -> None:
    """Render the prompts of a step's first round, if they are known before it begins: those of a curriculum are not.

    If the rollouts follow the present update directly, workers get their requests now: GPUs need not wait for this process.
    """
    if step == recipe.steps or parts.carried.progress is not None:
        return
    directly = follows and parts.noise is None and parts.engine.forward == Forward(recipe.numerics.of("rollout"))
    requests: list[Request] = []
    with suppress(LockstepError):  # raised again when the step asks for them
        prompts = round_prompts(parts.task, recipe, step, 0, (), 0)
        parts.policy.chat.prepare(prompts)
        requests = first_requests(parts, recipe, prompts, step) if directly and parts.begin else []
    if requests and parts.begin:
        parts.begin(requests)


def take_in(parts: Parts, groups: Sequence[Group]) -> Metrics:
    """Update the curriculum of a mix; returns its solve rates and new task weights."""
    task, progress = parts.task, parts.carried.progress
    if not isinstance(task, Mixed) or progress is None:
        return {}
    task.learn(progress, groups)
    rates = {f"task/{name}/solve_rate": rate for name, rate in progress.rates.items()}
    return rates | {f"task/{name}/share": share for name, share in task.shares(progress).items()}


def round_prompts(
    task: Task, recipe: Recipe, step: int, number: int, asked: Sequence[Group], accepted: int
) -> list[Prompt]:
    """Return the prompts of round `number` of a step: as many as are likely to fill it, none that this step has asked before.

    They begin the batch of index step · max_rounds + number, which no other round of any step has.
    """
    dynamic, size = recipe.algorithm.dynamic_sampling, recipe.prompts_per_step
    if not dynamic.enabled:
        return list(task.batch(step, size))
    before = {group.prompt.id for group in asked}
    fresh = [prompt for prompt in task.batch(step * dynamic.max_rounds + number, size) if prompt.id not in before]
    if not accepted:
        return fresh
    return fresh[: math.ceil(MARGIN * (size - accepted) * len(asked) / accepted)]


def mixed(group: Group) -> bool:
    """Return whether some replies are right and some wrong, by the unshaped accuracy: `correct` of the grade, which is 1 for a
    right reply. Without this metric: whether the rewards differ. Unscored replies do not count.
    """
    grades = [rollout.grade for rollout in group.rollouts if rollout.grade.scored]
    if all("correct" in grade.metrics for grade in grades):
        return len({grade.metrics["correct"] >= 1 for grade in grades}) > 1
    return len({grade.reward for grade in grades}) > 1


def _shortfall(accepted: int, drawn: int, recipe: Recipe) -> str:
    wanted = recipe.prompts_per_step
    if accepted >= wanted:
        return ""
    found = (
        f"{accepted} of the {wanted} prompts of the step have some right and some wrong answers, after "
        f"{recipe.algorithm.dynamic_sampling.max_rounds} rounds with {drawn} prompts"
    )
    return f"{found}: the step goes on with them" if accepted else f"{found}: the step updates nothing"
