"""Self-test of a task, before a run and while it goes on: prompts are the same when drawn twice, and rewards are as due."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.schema import Recipe
from lockstep.data.questions import question_digest
from lockstep.errors import HealthStop, TaskError
from lockstep.tasks.base import BuiltTask, SelfTested
from lockstep.types import Prompt
from lockstep.verifiers.base import workers_of

STEPS = 8
"""Steps whose prompts are asked for twice before a run, in another order the second time."""
TESTED, TESTED_SLOW = 32, 4
"""Prompts of a step on which grading is tested, for graders in this process and for those that work in others."""


def check_purity(task: BuiltTask, recipe: Recipe) -> list[str]:
    """Ask for the prompts of the first steps twice. Returns what a reader should know; counts questions that repeat.

    Raises TaskError, naming the prompt, if a step's prompts depend on what was asked before, or if one id stands for two
    questions.
    """
    steps, size = range(min(STEPS, recipe.steps)), recipe.prompts_per_step
    first = {step: tuple(task.batch(step, size)) for step in steps}
    for step in reversed(steps):
        _refuse_change(task, step, first[step], tuple(task.batch(step, size)))
    asked: dict[str, bytes] = {}
    for prompt in (prompt for prompts in first.values() for prompt in prompts):
        digest = question_digest(prompt.messages) + prompt.answer.encode("utf-8", "replace")
        if asked.setdefault(prompt.id, digest) != digest:
            raise TaskError(
                f"the id {prompt.id} stands for two questions or answers",
                where=f"task {task.name}",
                fix="give each question an id of its own",
            )
    questions = {question_digest(prompt.messages) for prompts in first.values() for prompt in prompts}
    total = sum(map(len, first.values()))
    repeats = [f"{total - len(asked)} prompts come again"] if total > len(asked) else []
    again = len(asked) - len(questions)
    repeats += [f"{again} prompts repeat a question under another id"] if again else []
    head = f"task {task.name}: {len(questions)} different questions in the first {len(steps)} steps, the same when drawn twice"
    return ["; ".join([head, *repeats])]


def check_grading(task: BuiltTask, prompts: Sequence[Prompt], step: int) -> int:
    """Grade right, empty and wrong replies to some of a step's prompts; how many prompts were tried.

    Raises HealthStop, naming the prompt and the reply, if one is not paid what is due.
    """
    if not isinstance(task, SelfTested):
        return 0
    tried = prompts[: TESTED_SLOW if workers_of(task) else TESTED]
    for prompt in tried:
        if found := task.problems(prompt):
            raise HealthStop(
                f"the self-test of the grader failed: {found[0]}"
                + (f" (and {len(found) - 1} more)" if found[1:] else ""),
                where=f"step {step}",
                fix="fix the verifier, or the reference answer; no reward since the last test can be trusted",
            )
    return len(tried)


def _refuse_change(task: BuiltTask, step: int, before: tuple[Prompt, ...], after: tuple[Prompt, ...]) -> None:
    if before == after:
        return
    changed = next((b for b, a in zip(before, after, strict=False) if a != b), None)
    raise TaskError(
        f"step {step} asks other prompts when it is asked again"
        + (f"; the first that differs is {changed.id}" if changed else ""),
        where=f"task {task.name}",
        fix="let batch(step, size) depend on its arguments alone: no random state, no position, no clock",
    )
