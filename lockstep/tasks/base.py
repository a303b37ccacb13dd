"""What the tasks share: the protocol that build_task returns, drawing a batch, and checking the references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol, runtime_checkable

from lockstep.data.order import batch_indices
from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt, Task
from lockstep.verifiers.base import Verifier, workers_of
from lockstep.verifiers.judge import asks_judge
from lockstep.verifiers.python import UserFunction
from lockstep.verifiers.selftest import self_test

SELF_TESTED = 20
"""Prompts on which a grader of the user's is tried; built-in ones are tried on all."""
MUTATED, MUTATED_SLOW = 200, 8
"""Prompts from which wrong answers are made, for verifiers that grade here and for those that work in processes."""
_SHOWN = 5


class BuiltTask(Task, Protocol):
    """A task as build_task returns it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should read before a run: counts of questions drawn, dropped and held out."""


class NoQuestions:
    """The task of a supervised run that evaluates nothing: it has no prompts."""

    name = "none"
    notes: tuple[str, ...] = ()

    def batch(self, step: int, size: int) -> tuple[Prompt, ...]:
        return ()

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        raise self._refusal()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        raise self._refusal()

    def _refusal(self) -> TaskError:
        return TaskError(
            "this run has no task, so there is nothing to ask and to grade",
            where="task.kind = none",
            fix="name a recipe that has one with --recipe",
        )


@runtime_checkable
class SelfTested(Protocol):
    """A task whose grading can be tested while a run goes on."""

    def problems(self, prompt: Prompt) -> list[str]:
        """What is wrong with the grading of one of its prompts: of a right reply, nothing, garbage, and wrong answers."""


def draw_batch(pool: Sequence[Prompt], step: int, size: int, seed: int, where: str) -> tuple[Prompt, ...]:
    """The different prompts of a step; see data.order. Raises TaskError if the pool is smaller than the batch."""
    if size > len(pool):
        raise TaskError(
            f"a step asks {size} different questions, there are only {len(pool)} to train on",
            where=where,
            fix=f"set prompts_per_step={len(pool)} or lower, or give the task more questions",
        )
    return tuple(pool[index] for index in batch_indices(step, size, len(pool), seed))


def check_references(verifier: Verifier, prompts: Sequence[Prompt], where: str) -> None:
    """Raise TaskError unless the verifier pays 1 for a right reply to each prompt; and 0 for nothing, for garbage, and, on a
    sample of the prompts, for twenty wrong answers made from the reference.

    A function of the user's may pay as it likes, so for it the probes only have to be scored, on 20 prompts. So many are tried
    with a judge, which costs money.
    """
    own, slow = isinstance(verifier, UserFunction), workers_of(verifier) > 0
    mutated = set(_sample(range(len(prompts)), MUTATED_SLOW if slow else MUTATED))
    few = own or asks_judge(verifier)
    tried = _sample(range(len(prompts)), SELF_TESTED) if few else range(len(prompts))
    found, asked = [], 0
    for index in tried:
        asked += 1
        often = not slow or index in mutated  # processes are asked for the rest of the references alone
        problems = self_test(verifier, prompts[index], pays=not own, garbage=own or often, mutations=index in mutated)
        if problems:
            found.append(problems)
        if few and len(found) == _SHOWN:  # each may have waited for its time to run out, or for a judge
            break
    if found:
        lines = "\n".join(f"  {problems[0]}" for problems in found[:_SHOWN])
        raise TaskError(
            f"the verifier cannot grade {len(found)} of {asked} questions; the first:\n{lines}",
            where=where,
            fix="correct the grader" if own else "use another task.verifier, or correct the answers",
        )


def grading_problems(verifier: Verifier, prompt: Prompt) -> list[str]:
    """The self-test of one prompt in full."""
    return self_test(verifier, prompt, pays=not isinstance(verifier, UserFunction), mutations=True)


def _sample(indices: range, count: int) -> Sequence[int]:
    return indices[:: max(1, len(indices) // count)][:count]


def no_such_role(role: str, has: Sequence[str], where: str) -> NoReturn:
    """Raise TaskError for a held-out role that the task does not have."""
    names = ", ".join(has) or "none"
    raise TaskError(f"it has no held-out questions for {role}; it has {names}", where=where, fix="use one that it has")
