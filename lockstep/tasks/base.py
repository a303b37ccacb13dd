"""The base class of tasks, drawing a batch, and checking the references."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lockstep.config.schema import Turns
from lockstep.data.order import batch_indices
from lockstep.envs.runners import Runner
from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import Verifier, keep_in, workers_of
from lockstep.verifiers.judge import asks_judge
from lockstep.verifiers.python import UserFunction
from lockstep.verifiers.selftest import self_test

SELF_TESTED = 20
"""Prompts on which a grader of the user's is tried; built-in ones are tried on all."""
MUTATED, MUTATED_SLOW = 200, 8
"""Prompts from which wrong answers are made, for verifiers that grade here and for those that work in processes."""
_SHOWN = 5


class BuiltTask(ABC):
    """A task as build_task returns it: a `types.Task`, and what the system asks of it beyond that, with defaults."""

    name: str

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user to read before a run: counts of questions drawn, dropped and held out."""
        return ()

    @property
    def workers(self) -> int:
        """Replies that it grades at once, in processes of its own; 0: one by one, in this process."""
        return 0

    @property
    def plays(self) -> bool:
        """True if any of its prompts may begin an episode of several turns."""
        return False

    @abstractmethod
    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        """The prompts of one step."""

    @abstractmethod
    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Prompts that `batch` never returns."""

    @abstractmethod
    def grade(self, prompt: Prompt, reply: str) -> Grade:
        """Never raises for a bad answer."""

    def workers_for(self, prompt: Prompt) -> int:
        """`workers`, for replies to this prompt."""
        return self.workers

    def runner(self, prompt: Prompt) -> Runner | None:
        """Where the prompt's environment runs; None for a question with one reply."""
        return None

    def limits(self, prompt: Prompt) -> Turns:
        """Limits of an episode; they mean nothing for a question with one reply."""
        return _NO_LIMITS

    def problems(self, prompt: Prompt) -> list[str]:
        """Faults of the grading of a prompt: of a right reply, of nothing, of garbage, and of wrong answers."""
        return []

    def keep_in(self, folder: Path) -> None:  # noqa: B027 - most tasks have nothing to keep
        """Keep in `folder` what must not be asked twice, such as a judge's verdicts."""


_NO_LIMITS = Turns()


class VerifiedTask(BuiltTask):
    """A task whose replies are graded by a verifier."""

    verifier: Verifier

    @property
    def workers(self) -> int:
        return workers_of(self.verifier)

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return self.verifier.grade(prompt, reply)

    def problems(self, prompt: Prompt) -> list[str]:
        return grading_problems(self.verifier, prompt)

    def keep_in(self, folder: Path) -> None:
        keep_in(self.verifier, folder)


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
