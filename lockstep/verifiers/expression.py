"""The verifier `math`: compares answers as numbers or as text, and by computer algebra only if neither decides."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, assert_never

from lockstep.types import Grade, Prompt
from lockstep.verifiers import symbolic
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.extract import MINUS, read_answer
from lockstep.verifiers.normalise import MAX_DIGITS, close, parse_number, plain
from lockstep.verifiers.screen import too_hard
from lockstep.verifiers.sets import encloses, split_items
from lockstep.workers.pool import Answered, Died, Exceeded, Failed, Outcome, Work, WorkerPool

if TYPE_CHECKING:
    from lockstep.config import schema

WALL_SECONDS = 30.0
"""A comparison that has not ended by then, though it has not used up its processor time, was held up by the machine."""
CACHED = 4096
_HEDGES = frozenset(("not", "no", "or", "nor", "either", "neither", "and", "but", "unless"))
_SPELLINGS = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("\\cdot", "*"),
    ("\\times", "*"),
)


class Expression:
    """Scores 1 if the reply's answer equals the reference, else 0. Settings: config.schema.MathVerifier."""

    def __init__(self, settings: schema.MathVerifier) -> None:
        self._settings = settings
        work = Work(
            symbolic.__name__,
            {},
            "verifier math",
            wall_seconds=WALL_SECONDS + 4 * settings.cpu_seconds,
            cpu_seconds=settings.cpu_seconds,
            memory=int(settings.memory_gib * 2**30),
        )
        self.pool = WorkerPool(work, settings.workers)
        self.workers = settings.workers
        self._cache: OrderedDict[tuple[str, str], Outcome] = OrderedDict()
        self._lock = Lock()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        """Raises TaskError only if no process for comparisons can be started."""
        if not prompt.answer.strip():
            return unscored(f"the reference answer of {shown(prompt.id)} is empty")
        answer = read_answer(reply, self._settings.fallback)
        known = decide(answer.text or "", prompt.answer, self._settings.tolerance, self._settings.written_out)
        if known is not None:
            return _with(verdict(answer, known), symbolic=0, too_hard=0)
        written, reference = _latex(answer.text or ""), _latex(prompt.answer)
        if too_hard(written, reference):
            return _with(verdict(answer, False), symbolic=0, too_hard=1)
        outcome = self._compare(written, reference)
        match outcome:
            case Answered("no reference"):
                return unscored(f"the reference answer of {shown(prompt.id)} cannot be read: {shown(prompt.answer)!r}")
            case Answered(value):
                return _with(verdict(answer, value == "equal"), symbolic=1, too_hard=0)
            case Exceeded("time", error):
                return unscored(f"the comparison was held up: {error}")
            case Exceeded():
                return _with(verdict(answer, False), symbolic=1, too_hard=1)
            case Failed():
                # An expression that computer algebra cannot work with; the reference was tried before the run.
                return _with(verdict(answer, False), symbolic=1, too_hard=0)
            case Died(error):
                return unscored(f"the comparison did not live: {error}")
            case _:
                assert_never(outcome)

    def _compare(self, answer: str, reference: str) -> Outcome:
        """By computer algebra; remembered, because a group's replies often have the same answer."""
        key = (answer, reference)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        outcome = self.pool.call({"answer": answer, "reference": reference})
        held_up = isinstance(outcome, Died) or (isinstance(outcome, Exceeded) and outcome.limit == "time")
        if not held_up:  # those say nothing about the answer
            with self._lock:
                self._cache[key] = outcome
                if len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
        return outcome

    def forget(self) -> None:
        """Drop remembered comparisons."""
        with self._lock:
            self._cache.clear()


def decide(answer: str, reference: str, tolerance: float, written_out: bool = False) -> bool | None:
    """Decide without computer algebra, in time linear in both texts: right, wrong, or None if it is not known.

    Two written numbers are right or wrong; the same text, but for spaces and spellings of LaTeX, is right; nothing is wrong.
    """
    plainly = answer.isascii() and reference.isascii() and answer.isdigit() and reference.isdigit()
    if plainly and max(len(answer), len(reference)) <= MAX_DIGITS:
        return answer.lstrip("0") == reference.lstrip("0")
    if not answer.strip():
        return False
    right = parse_number(reference)
    if right is not None:
        value = parse_number(answer)
        if value is not None:
            return close(value, right, tolerance)
        if written_out or _hedges(answer):
            return False
    if spelling(answer) == spelling(reference):
        return True
    return False if {_brackets(answer), _brackets(reference)} == {"set", "tuple"} else None


def _brackets(text: str) -> str:
    r"""Return which of "set", \{1,2\}, and "tuple", (1,2) or an interval, a text writes; "" for anything else."""
    body = spelling(text).rpartition("=")[2]
    for opening, closing in (("\\{", "\\}"), ("\\lbrace", "\\rbrace")):
        if body.startswith(opening) and body.endswith(closing) and encloses(body, opening, closing):
            return "set"
    listed = body.startswith(("(", "[")) and body.endswith((")", "]")) and "," in body
    return "tuple" if listed and encloses(body, "(", ")") else ""


def _hedges(answer: str) -> bool:
    """Return whether an answer to a question for a number gives several, or negates itself. Computer algebra would read 41 = 42
    as 42, the last part; 0 0 as 0, their product; and "not 0" as 0, a product of letters and 0."""
    parts = re.split(r"=|\\approx\b", answer, maxsplit=8)[:8]
    values = {value for part in parts if (value := parse_number(part)) is not None}
    words = plain(answer).split()
    mixed = len(words) == 2 and words[0].lstrip("-").isdigit() and words[1].startswith(("\\frac", "\\dfrac", "\\tfrac"))
    apart = len(words) > 1 and not mixed and all(parse_number(word) is not None for word in words)
    several = len(split_items(answer)) != 1 or "\\cup" in answer
    return several or len(values) > 1 or apart or not _HEDGES.isdisjoint(word.casefold() for word in words)


def spelling(text: str) -> str:
    """Text without spaces, and with one spelling of each command; case matters."""
    text = plain(text.translate(MINUS))
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    # A space between two letters or digits means something: 4 2 is not 42.
    words, made = text.split(), ""
    for word in words:
        made += f" {word}" if made[-1:].isalnum() and word[0].isalnum() else word
    return made


def _latex(text: str) -> str:
    return plain(text.translate(MINUS)).replace("\\$", "").replace("$", "")


def _with(grade: Grade, **metrics: float) -> Grade:
    return replace(grade, metrics={**grade.metrics, **{name: float(value) for name, value in metrics.items()}})
