"""The interface of verifiers, and helpers that make the grades of the built-in ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, cast

from lockstep.types import Grade, Prompt, ReplyText
from lockstep.verifiers.extract import Answer

MAX_SHOWN = 200
"""Characters of an answer that are kept in a Grade or shown in an error."""

CANCEL: ContextVar[threading.Event | None] = ContextVar("CANCEL", default=None)
"""Set when the grade is no longer needed: a verifier that waits for a judge then gives up."""


class Verifier(Protocol):
    """Grades one reply. Pure: the grade depends on the arguments alone."""

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        """Never raises for a bad answer. `Grade.reward is None` means that the reply could not be scored."""


Reads: TypeAlias = Literal["answer", "reply", "group"]
"""Input of one call of a grader: the text after the thoughts, a whole reply, or all samples of a prompt."""


class ReplyVerifier(Verifier, Protocol):
    """A verifier that reads whole replies, or all of a group."""

    reads: Reads

    def grade_replies(self, prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        """Return a grade for each reply; never raises for a bad one."""


Asked: TypeAlias = tuple[Prompt, Sequence[str | ReplyText]]
"""Replies that one call grades: one, or all samples of the prompt."""
GradeMany: TypeAlias = Callable[[Sequence[Asked], Callable[[], None]], Iterator[list[Grade]]]
"""Grades the first of several calls, in order; see WorkerPool.call_many."""


def workers_of(grader: object) -> int:
    """Return the number of replies that a verifier grades at once in worker processes, its attribute `workers`; 0: one by one."""
    return int(getattr(grader, "workers", 0))


def notes_of(verifier: object) -> tuple[str, ...]:
    """Return the lines that a user should read before a run: the verifier's attribute `notes`."""
    return tuple(getattr(verifier, "notes", ()))


def reads_of(verifier: Verifier) -> Reads:
    """Return the input of one call of a verifier, its attribute `reads`; without one it is `answer`."""
    reads: Reads = getattr(verifier, "reads", "answer")
    return reads


def grade_replies(verifier: Verifier, prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
    """Grade replies to one prompt together: by the method `grade_replies` of a verifier that reads more than the answer."""
    if reads_of(verifier) == "answer":
        return [verifier.grade(prompt, reply.answer) for reply in replies]
    return cast(ReplyVerifier, verifier).grade_replies(prompt, replies)


def keep_in(grader: object, folder: Path) -> None:
    """Have a verifier or task keep there what it must not ask twice, if it says so by a method `keep_in`."""
    method = getattr(grader, "keep_in", None)
    if method is not None:
        method(folder)


def shown(text: str) -> str:
    """Text that is safe to store as UTF-8, cut to MAX_SHOWN characters."""
    safe = text[:MAX_SHOWN].encode("utf-8", "replace").decode("utf-8")
    return safe + "…" if len(text) > MAX_SHOWN else safe


def verdict(answer: Answer, correct: bool, *, boxes: bool = True) -> Grade:
    """Grade a reply that was read: 1 or 0, with the diagnostics of docs/verifiers.md. `boxes`: it reads boxed answers."""
    box = {"boxed": float(answer.method == "boxed"), "boxed_in_final": float(answer.boxed_in_final)} if boxes else {}
    return Grade(
        reward=float(correct),
        metrics={"correct": float(correct), "has_answer": float(bool(answer.text)), **box},
        extracted=None if answer.text is None else shown(answer.text),
        method=answer.method,
    )


def unscored(error: str) -> Grade:
    """Grade of a reply that could not be scored, through no fault of the reply."""
    return Grade(reward=None, error=error)
