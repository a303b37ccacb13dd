"""Which groups a step trains on: the prompts of the step, or with dynamic sampling those with some right and some wrong
answers (DAPO, arXiv 2503.14476, §3.2), for which further prompts are drawn in rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.config.schema import Recipe
from lockstep.envs.driver import plays
from lockstep.loops.grading import Grader
from lockstep.loops.journal import Clock
from lockstep.loops.parts import Parts
from lockstep.loops.rollouts import check_scored, sample_groups
from lockstep.loops.turns import play_groups
from lockstep.tasks.mixed import Mixed
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
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environments did in the first round, and what a curriculum has made of it."""

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
    unscored, played = "", Metrics()
    for number in range(rounds):
        prompts = step_prompts(parts, recipe, step, number, groups, len(kept))
        more, found = _answered(parts, recipe, prompts, step, clock)
        groups, played = groups + more, played or found
        unscored = check_scored(groups, recipe, step + 1)
        kept = [index for index, group in enumerate(groups) if not dynamic.enabled or mixed(group)]
        if len(kept) >= recipe.prompts_per_step:
            break
    warnings = tuple(text for text in (unscored, _shortfall(len(kept), len(groups), recipe)) if text)
    played |= take_in(parts, groups)
    return Drawn(tuple(groups), tuple(kept[: recipe.prompts_per_step]), len(kept), number + 1, warnings, played)


def _answered(
    parts: Parts, recipe: Recipe, prompts: Sequence[Prompt], step: int, clock: Clock
) -> tuple[list[Group], Metrics]:
    """The prompts with their graded samples, and what environments did if there are any."""
    engine, chat, task, version = parts.engine, parts.policy.chat, parts.task, parts.learner.version
    if plays(task):
        with clock("rollout"):
            return play_groups(engine, chat, task, prompts, recipe, step, version, clock)
    with Grader(task, chat) as grader:
        with clock("rollout"):
            completions = sample_groups(engine, chat, prompts, recipe, step, version, grader.take)
        clock.move(grader.held, "rollout", "grade")
        with clock("grade"):
            groups = grader.groups(prompts, completions)
        clock.add(grader.metrics)
    return groups, {}


def step_prompts(
    parts: Parts, recipe: Recipe, step: int, number: int, asked: Sequence[Group], accepted: int
) -> list[Prompt]:
    """The prompts of round `number` of a step; with a curriculum they depend on what has been solved so far."""
    task, progress = parts.task, parts.carried.progress
    if not isinstance(task, Mixed) or progress is None:
        return round_prompts(task, recipe, step, number, asked, accepted)
    before = {group.prompt.id for group in asked}
    return [prompt for prompt in task.deal(progress, recipe.prompts_per_step) if prompt.id not in before]


def take_in(parts: Parts, groups: Sequence[Group]) -> Metrics:
    """Let the curriculum of a mix learn from a step; the shares that its tasks have from now on."""
    task, progress = parts.task, parts.carried.progress
    if not isinstance(task, Mixed) or progress is None:
        return {}
    task.learn(progress, groups)
    rates = {f"task/{name}/solve_rate": rate for name, rate in progress.rates.items()}
    return rates | {f"task/{name}/share": share for name, share in task.shares(progress).items()}


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
    """How environments, curriculum and dynamic sampling went; nothing of those that are off."""
    if not recipe.algorithm.dynamic_sampling.enabled:
        return dict(drawn.metrics)
    return {
        **drawn.metrics,
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
