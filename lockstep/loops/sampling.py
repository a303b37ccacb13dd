"""Which groups a step trains on: the prompts of the step, or with dynamic sampling those with some right and some wrong
answers (DAPO, arXiv 2503.14476, §3.2), for which further prompts are drawn in rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.schema import Recipe
from lockstep.loops.journal import Clock
from lockstep.loops.parts import Parts
from lockstep.loops.rollouts import check_scored, grade_groups, sample_groups
from lockstep.types import Group, Metrics, Prompt, Task

MARGIN = 1.5
"""A further round draws so many times the prompts that the acceptance so far asks for: a short round costs a whole other one."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was sampled and graded for a step."""

    groups: tuple[Group, ...]
    """All of them, in the order in which they were drawn."""
    kept: tuple[int, ...]
    """Indices of those that are trained on."""
    accepted: int
    """How many could have been; a surplus is cut."""
    rounds: int
    warnings: tuple[str, ...] = ()

    @property
    def kept_groups(self) -> tuple[Group, ...]:
        return tuple(self.groups[index] for index in self.kept)

    def spread(self, rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
        """Rows of the kept groups as rows of all groups, with zeros for those that were left out."""
        of_kept = dict(zip(self.kept, rows, strict=True))
        return [of_kept.get(index, (0.0,) * len(group.rollouts)) for index, group in enumerate(self.groups)]


def draw_groups(parts: Parts, recipe: Recipe, step: int, clock: Clock) -> Drawn:
    """Sample and grade the groups of a step, in several rounds if dynamic sampling is on and the first was not enough.

    Raises HealthStop if too many replies could not be scored.
    """
    dynamic = recipe.algorithm.dynamic_sampling
    rounds = dynamic.max_rounds if dynamic.enabled else 1
    groups: list[Group] = []
    kept: list[int] = []
    unscored = ""
    for number in range(rounds):
        prompts = round_prompts(parts.task, recipe, step, number, groups, len(kept))
        with clock("rollout"):
            completions = sample_groups(parts.engine, parts.policy.chat, prompts, recipe, step, parts.learner.version)
        with clock("grade"):
            groups += grade_groups(parts.task, parts.policy.chat, prompts, completions)
        unscored = check_scored(groups, recipe, step + 1)
        kept = [index for index, group in enumerate(groups) if not dynamic.enabled or mixed(group)]
        if len(kept) >= recipe.prompts_per_step:
            break
    warnings = [text for text in (unscored, _shortfall(len(kept), len(groups), recipe)) if text]
    return Drawn(tuple(groups), tuple(kept[: recipe.prompts_per_step]), len(kept), number + 1, tuple(warnings))


def round_prompts(
    task: Task, recipe: Recipe, step: int, number: int, asked: Sequence[Group], accepted: int
) -> list[Prompt]:
    """The prompts of round `number` of a step: so many as are likely to fill it, none that this step has asked before.

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
    """Whether some replies are right and some wrong, by the unshaped accuracy: `correct` of the grade, which is 1 for a right
    reply. Without such a metric, whether the rewards differ. Unscored replies are no evidence."""
    grades = [rollout.grade for rollout in group.rollouts if rollout.grade.scored]
    if all("correct" in grade.metrics for grade in grades):
        return len({grade.metrics["correct"] >= 1 for grade in grades}) > 1
    return len({grade.reward for grade in grades}) > 1


def sampling_metrics(drawn: Drawn, recipe: Recipe, empty_steps: int) -> Metrics:
    """How dynamic sampling went; nothing if it is off."""
    if not recipe.algorithm.dynamic_sampling.enabled:
        return {}
    return {
        "sampling/acceptance_rate": drawn.accepted / len(drawn.groups),
        "sampling/rounds": float(drawn.rounds),
        "sampling/prompts_drawn": float(len(drawn.groups)),
        "sampling/empty_steps": float(empty_steps),
    }


def _shortfall(accepted: int, drawn: int, recipe: Recipe) -> str:
    wanted = recipe.prompts_per_step
    if accepted >= wanted:
        return ""
    found = (
        f"{accepted} of the {wanted} prompts of the step have some right and some wrong answers, after "
        f"{recipe.algorithm.dynamic_sampling.max_rounds} rounds with {drawn} prompts"
    )
    return f"{found}: the step goes on with them" if accepted else f"{found}: the step updates nothing"
