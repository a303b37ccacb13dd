"""Checks before, during and after a run: repeatable prompts, correct grades, unchanged data and frozen weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.metric import Tier
from lockstep.config.schema import Recipe
from lockstep.data.questions import data_hash, question_digest
from lockstep.errors import DataError, HealthStop, LearnerError, TaskError
from lockstep.loops.sampling import round_prompts
from lockstep.sync.fingerprint import Fingerprints
from lockstep.tasks.base import BuiltTask
from lockstep.types import Prompt

STEPS = 8
"""Number of steps whose prompts are asked for twice before a run, the second time in another order."""
TESTED, TESTED_SLOW = 32, 4
"""Prompts per step on which grading is tested: for graders in this process, and for those in worker processes."""


def check_purity(task: BuiltTask, recipe: Recipe) -> list[str]:
    """Ask for the prompts of the first steps twice. Returns lines for the reader; counts questions that repeat.

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
                f"two prompts with different questions or answers have the id {prompt.id}",
                where=f"task {task.name}",
                fix="give each question its own id",
            )
    questions = {question_digest(prompt.messages) for prompts in first.values() for prompt in prompts}
    total = sum(map(len, first.values()))
    repeats = [f"{total - len(asked)} prompts come again"] if total > len(asked) else []
    again = len(asked) - len(questions)
    repeats += [f"{again} prompts repeat a question under another id"] if again else []
    head = f"task {task.name}: {len(questions)} different questions in the first {len(steps)} steps, the same when drawn twice"
    return ["; ".join([head, *repeats])]


def check_grading(task: BuiltTask, prompts: Sequence[Prompt], step: int) -> int:
    """Grade correct, empty and wrong replies to some of a step's prompts; returns how many prompts were tried.

    Raises HealthStop, naming the prompt and the reply, if one does not get its expected score.
    """
    tried = prompts[: TESTED_SLOW if task.workers else TESTED]
    for prompt in tried:
        if found := task.problems(prompt):
            raise HealthStop(
                f"the self-test of the grader failed: {found[0]}"
                + (f" (and {len(found) - 1} more)" if found[1:] else ""),
                where=f"step {step}",
                fix="fix the verifier or the reference answer, and trust no score since the last self-test",
            )
    return len(tried)


def check_garbage(task: BuiltTask, prompts: Sequence[Prompt], step: int, tier: Tier) -> str:
    """Return a warning if garbage is rewarded at least as much as the reference for every prompt tried.

    Raises HealthStop instead if `tier` is stop.
    """
    found = [task.garbage(prompt) for prompt in prompts[:TESTED_SLOW]] if tier != "off" else [""]
    if not all(found):
        return ""
    what = f"the grader rewards garbage like a right reply: {found[0]}"
    if tier == "warn":
        return what
    raise HealthStop(
        what,
        where=f"step {step}",
        fix="let the grader look at the answer; if it may reward any reply, set health.garbage=warn",
    )


def _refuse_change(task: BuiltTask, step: int, before: tuple[Prompt, ...], after: tuple[Prompt, ...]) -> None:
    if before == after:
        return
    changed = next((b for b, a in zip(before, after, strict=False) if a != b), None)
    raise TaskError(
        f"the task gives different prompts for step {step} when its batch is requested again"
        + (f"; the first that differs is {changed.id}" if changed else ""),
        where=f"task {task.name}",
        fix="let batch(step, size) depend on its arguments alone: no random state, no position, no clock",
    )


def questions_hash(task: BuiltTask, recipe: Recipe) -> str:
    """Hash the prompts of steps 0, 1, the middle and the last; empty for SFT. Batches are functions of the step alone."""
    if recipe.loop != "rl":
        return ""
    steps = sorted({0, 1, recipe.steps // 2, recipe.steps - 1})
    return data_hash([prompt for step in steps for prompt in round_prompts(task, recipe, step, 0, (), 0)])


def require_same_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DataError if the manifest of the earlier attempts names other data. `now`: the entries to be written into it."""
    names = {
        "questions_hash": "the training prompts changed",
        "heldout_hash": "the held-out items changed",
        "sft": "the training rows changed",
    }
    for name, what in names.items():
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            old, new = old.get("content_hash"), new.get("content_hash")
        if old and new and old != new:
            raise DataError(
                f"{what} since the run started ({old} then, {new} now)",
                where=str(name),
                fix="restore the data, the task's code and its packages, then resume; or start a new run from this one's "
                "weights (warm_start)",
            )


def require_unchanged(before: Fingerprints, after: Fingerprints) -> str:
    """Return a line that says that the frozen weights are unchanged. Raises LearnerError naming those that changed."""
    names = before.tensors.keys() | after.tensors.keys()
    changed = sorted(name for name in names if before.tensors.get(name) != after.tensors.get(name))
    if changed:
        raise LearnerError(
            f"{len(changed)} frozen weights changed in this run, the first is {changed[0]}",
            where="frozen weights",
            fix="use no checkpoint of this run: their base no longer exists; report which other programs ran during the training",
        )
    return f"base unchanged: {len(before.tensors)} frozen tensors, fingerprint {before.combined} at start and end"
