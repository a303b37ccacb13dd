"""The base class of tasks, the choice of a batch, and a test that the verifier accepts the reference answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lockstep.config.schema import Turns
from lockstep.data.order import batch_indices
from lockstep.envs.programs import Programs
from lockstep.envs.runners import Runner
from lockstep.errors import TaskError
from lockstep.types import Grade, OpenEndpoint, Prompt, ReplyText
from lockstep.verifiers.base import (
    GradeMany,
    Reads,
    Verifier,
    grade_replies,
    keep_in,
    reads_of,
    unscored,
    workers_of,
)
from lockstep.verifiers.judge import asks_judge
from lockstep.verifiers.python import UserGrader
from lockstep.verifiers.selftest import applies, scored_garbage, self_test

SELF_TESTED = 20
"""Number of prompts on which a user's grader is tried; built-in graders are tried on all."""
MUTATED, MUTATED_SLOW = 200, 8
"""Number of prompts from which wrong answers are made: for verifiers in this process, and for those in worker processes."""
_SHOWN = 5


class BuiltTask(ABC):
    """A task as build_task returns it: a `types.Task`, and further methods that the system needs, with defaults."""

    name: str
    open_endpoint: OpenEndpoint | None = None
    """Opens the endpoint that programs ask; set where a run is built."""
    turns = Turns()
    """Limits of an episode; they mean nothing for a question with one reply."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user to read before a run: counts of questions drawn, dropped and held out."""
        return ()

    @property
    def workers(self) -> int:
        """Number of replies that it grades at the same time, in worker processes; 0: one by one, in this process."""
        return 0

    @property
    def plays(self) -> bool:
        """True if any of its prompts may begin an episode of several turns."""
        return False

    @abstractmethod
    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        """Return the prompts of one step."""

    @abstractmethod
    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Return prompts that `batch` never returns."""

    @abstractmethod
    def grade(self, prompt: Prompt, reply: str) -> Grade:
        """Grade one reply. Never raises for a bad answer."""

    def reads(self, prompt: Prompt) -> Reads:
        """Return what one call of the prompt's grader takes: the answer, a whole reply, or all samples of the prompt."""
        return "answer"

    def grade_replies(self, prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        """Grade replies to one prompt together, where `reads` is not `answer`."""
        return [self.grade(prompt, reply.answer) for reply in replies]

    def workers_for(self, prompt: Prompt) -> int:
        """Return `workers` for replies to this prompt."""
        return self.workers

    def grades_many(self, prompt: Prompt) -> tuple[GradeMany, Prompt] | None:
        """Return what grades replies to this and other prompts together, and the prompt for it; None if nothing does."""
        return None

    def apart(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt as the task that build_grader returns grades it, in any process; None if only this one can."""
        return None

    def runner(self, prompt: Prompt) -> Runner | None:
        """Return the runner of the prompt's environment; None for a question with one reply."""
        return None

    def programs(self, prompt: Prompt) -> Programs | None:
        """Return what plays the prompt's episode by asking the run's endpoint; None if no program does."""
        return None

    def limits(self, prompt: Prompt) -> Turns:
        """Return the limits of the prompt's episode."""
        return self.turns

    def problems(self, prompt: Prompt) -> list[str]:
        """Return faults in the grading of a prompt: of a right reply, an empty one, garbage, and wrong answers."""
        return []

    def garbage(self, prompt: Prompt) -> str:
        """Return the evidence that garbage is rewarded at least as much as the reference, else an empty text."""
        return ""

    def keep_in(self, folder: Path) -> None:  # noqa: B027 - most tasks have nothing to keep
        """Store in `folder` any results that must not be requested twice, such as a judge's verdicts."""


class NoQuestions(BuiltTask):
    """The task of a supervised run that evaluates nothing: it has no prompts."""

    name = "none"

    def batch(self, step: int, size: int) -> tuple[Prompt, ...]:
        return ()

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        raise self._refusal()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        raise self._refusal()

    def _refusal(self) -> TaskError:
        return TaskError(
            "the recipe has no task, so there are no questions to sample or evaluate",
            where="task.kind=none",
            fix="give a recipe that has a task: --recipe RECIPE",
        )


class Episodes(BuiltTask):
    """A task whose environments give the rewards."""

    plays = True

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return unscored(f"{self.name} is played, not graded by one reply")


class OfOthers(BuiltTask):
    """A task whose prompts come from other tasks, which grade the replies to them."""

    members: tuple[BuiltTask, ...]

    @abstractmethod
    def own(self, prompt: Prompt) -> tuple[BuiltTask, Prompt]:
        """Return the task that a prompt came from, and the prompt as that task grades it."""

    @property
    def workers(self) -> int:
        return max(task.workers for task in self.members)

    def workers_for(self, prompt: Prompt) -> int:
        """Return the number of workers of the prompt's own task: tasks that grade in this process get one reply at a time."""
        return self.own(prompt)[0].workers

    def grades_many(self, prompt: Prompt) -> tuple[GradeMany, Prompt] | None:
        task, own = self.own(prompt)
        return task.grades_many(own)

    def keep_in(self, folder: Path) -> None:
        for task in self.members:
            task.keep_in(folder)

    def problems(self, prompt: Prompt) -> list[str]:
        task, own = self.own(prompt)
        return task.problems(own)

    def garbage(self, prompt: Prompt) -> str:
        task, own = self.own(prompt)
        return task.garbage(own)

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        task, own = self.own(prompt)
        return task.grade(own, reply)

    def reads(self, prompt: Prompt) -> Reads:
        task, own = self.own(prompt)
        return task.reads(own)

    def grade_replies(self, prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        task, own = self.own(prompt)
        return task.grade_replies(own, replies)


class VerifiedTask(BuiltTask):
    """A task whose replies are graded by a verifier."""

    verifier: Verifier

    @property
    def workers(self) -> int:
        return workers_of(self.verifier)

    def grades_many(self, prompt: Prompt) -> tuple[GradeMany, Prompt] | None:
        together: GradeMany | None = getattr(self.verifier, "grade_many", None)
        return None if together is None else (together, prompt)

    def apart(self, prompt: Prompt) -> Prompt | None:
        if reads_of(self.verifier) != "answer" or asks_judge(self.verifier):  # a judge's verdicts are kept in one place
            return None
        return prompt

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return self.verifier.grade(prompt, reply)

    def reads(self, prompt: Prompt) -> Reads:
        return reads_of(self.verifier)

    def grade_replies(self, prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        return grade_replies(self.verifier, prompt, replies)

    def problems(self, prompt: Prompt) -> list[str]:
        return self_test(self.verifier, prompt, mutations=True)

    def garbage(self, prompt: Prompt) -> str:
        return scored_garbage(self.verifier, prompt)

    def keep_in(self, folder: Path) -> None:
        keep_in(self.verifier, folder)


class Grader(VerifiedTask, NoQuestions):
    """A task that only grades, where others ask."""

    name = "grader"

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier


def draw_batch(pool: Sequence[Prompt], step: int, size: int, seed: int, where: str) -> tuple[Prompt, ...]:
    """Return the different prompts of a step; see data.order. Raises TaskError if the pool is smaller than the batch."""
    if size > len(pool):
        raise TaskError(
            f"a step needs {size} different questions, but the task has only {len(pool)} for training",
            where=where,
            fix=f"set prompts_per_step={len(pool)} or lower, or give the task more questions",
        )
    return tuple(pool[index] for index in batch_indices(step, size, len(pool), seed))


def check_references(verifier: Verifier, prompts: Sequence[Prompt], where: str) -> None:
    """Raise TaskError unless the verifier scores 1 for a right reply to each prompt, and 0 for an empty reply, for garbage and,
    on a sample of the prompts, for twenty wrong answers made from the reference.

    A user's function may give any reward, so its replies only have to be scored, on 20 prompts. The same number is tried with a
    judge, which costs money.
    """
    own, slow = isinstance(verifier, UserGrader), workers_of(verifier) > 0
    mutated = set(_sample(range(len(prompts)), MUTATED_SLOW if slow else MUTATED))
    few = own or asks_judge(verifier)
    tried = _sample(range(len(prompts)), SELF_TESTED) if few else range(len(prompts))
    found, asked = [], 0
    for index in tried:
        asked += 1
        often = not slow or index in mutated  # worker processes only grade the rest of the references
        problems = self_test(verifier, prompts[index], garbage=own or often, mutations=index in mutated)
        if problems:
            found.append(problems)
        if few and len(found) == _SHOWN:  # each may have waited for its timeout, or for a judge
            break
    if found:
        lines = "\n".join(f"  {problems[0]}" for problems in found[:_SHOWN])
        raise TaskError(
            f"the verifier cannot grade {len(found)} of {asked} questions; the first:\n{lines}",
            where=where,
            fix="correct the grader" if own else "use another task.verifier, or correct the reference answers",
        )
    if own and tried and not any(applies(verifier.grade(prompts[index], "")) for index in tried):
        raise TaskError(
            f"every reward function returned None for each of the {len(tried)} questions that were tried",
            where=where,
            fix="choose reward functions that apply to these rows, or add the columns that the functions read to the rows",
        )


def _sample(indices: range, count: int) -> Sequence[int]:
    return indices[:: max(1, len(indices) // count)][:count]


def first_heldout(
    pools: Mapping[str, Sequence[Prompt]], role: str, size: int, where: str, what: str = "questions"
) -> Sequence[Prompt]:
    """Return the first held-out prompts of a role. Raises TaskError if the task does not have it, or has fewer."""
    if role not in pools:
        no_such_role(role, sorted(pools), where)
    pool = pools[role]
    if size > len(pool):
        raise TaskError(
            f"{size} held-out {what} were requested, but {role} has only {len(pool)}",
            where=where,
            fix=f"set eval.items={len(pool)} or lower (in `lockstep eval`: --items {len(pool)})",
        )
    return pool[:size]


def no_such_role(role: str, has: Sequence[str], where: str) -> NoReturn:
    """Raise TaskError for a held-out role that the task does not have."""
    names = ", ".join(has) or "none"
    raise TaskError(
        f"the task has no held-out questions for {role}; its roles are: {names}",
        where=where,
        fix="evaluate on one of its roles"
        if has
        else "set task.heldout_rows above 0 or give rows in task.heldout, or eval.enabled=false",
    )
