"""What every verifier is, and the grade that the built-in ones give."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from lockstep.types import Grade, Prompt
from lockstep.verifiers.extract import Answer

MAX_SHOWN = 200
"""Characters of an answer that are kept in a Grade or shown in an error."""

CANCEL: ContextVar[threading.Event | None] = ContextVar("CANCEL", default=None)
"""Set when nobody wants the grade any more: a verifier that waits for others then gives up."""


class Verifier(Protocol):
    """Grades one reply. Pure: the grade depends on the arguments alone."""

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        """Never raises for a bad answer. `Grade.reward is None` means that the reply could not be scored."""


def workers_of(grader: object) -> int:
    """How many replies a verifier or task may be given at once, because it grades them in processes of its own; 0: one by one.

    It says so by an attribute `workers`.
    """
    return int(getattr(grader, "workers", 0))


def workers_for(grader: object, prompt: Prompt) -> int:
    """As workers_of, for replies to one prompt: a mix of tasks, of which only some work so, has a method `workers_for`."""
    method = getattr(grader, "workers_for", None)
    return workers_of(grader) if method is None else int(method(prompt))


def notes_of(verifier: object) -> tuple[str, ...]:
    """What a user should read of a verifier before a run, which it says by an attribute `notes`."""
    return tuple(getattr(verifier, "notes", ()))


def keep_in(grader: object, folder: Path) -> None:
    """Have a verifier or task keep there what it must not ask twice, if it says so by a method `keep_in`."""
    method = getattr(grader, "keep_in", None)
    if method is not None:
        method(folder)


def shown(text: str) -> str:
    """Text that is safe to store as UTF-8, cut to MAX_SHOWN characters."""
    safe = text[:MAX_SHOWN].encode("utf-8", "replace").decode("utf-8")
    return safe + "…" if len(text) > MAX_SHOWN else safe


def verdict(answer: Answer, correct: bool) -> Grade:
    """Grade of a reply that was read: 1 or 0, with the diagnostics of docs/verifiers.md."""
    return Grade(
        reward=float(correct),
        metrics={
            "correct": float(correct),
            "has_answer": float(bool(answer.text)),
            "boxed": float(answer.method == "boxed"),
            "boxed_in_final": float(answer.boxed_in_final),
        },
        extracted=None if answer.text is None else shown(answer.text),
        method=answer.method,
    )


def unscored(error: str) -> Grade:
    """Grade of a reply that could not be scored, through no fault of the reply."""
    return Grade(reward=None, error=error)
