"""The verifiers that compare a number (within a tolerance) or a normalised text with the reference answer."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.extract import Answer, Fallback, read_answer
from lockstep.verifiers.normalise import close, normalise_text, parse_number


@dataclass(frozen=True, slots=True)
class Numeric:
    """Scores 1 if the reply's answer equals the reference's number within `tolerance`, else 0. Settings: NumericVerifier."""

    fallback: Fallback
    tolerance: float

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return same_number(prompt, read_answer(reply, self.fallback), self.tolerance)


@dataclass(frozen=True, slots=True)
class Text:
    """Scores 1 if the reply's answer is the reference's text after normalise_text, else 0. Settings: TextVerifier."""

    fallback: Fallback

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return same_text(prompt, read_answer(reply, self.fallback))


def same_number(prompt: Prompt, answer: Answer, tolerance: float, *, boxes: bool = True) -> Grade:
    """Grade an answer by whether it is the reference's number, within the tolerance. `boxes`: see verdict."""
    reference = parse_number(prompt.answer)
    if reference is None:
        return unscored(f"the reference answer of {shown(prompt.id)} is not a number: {shown(prompt.answer)!r}")
    value = None if answer.text is None else parse_number(answer.text)
    return verdict(answer, value is not None and close(value, reference, tolerance), boxes=boxes)


def same_text(prompt: Prompt, answer: Answer, *, boxes: bool = True) -> Grade:
    """Grade an answer by whether it is the reference's text, both normalised. `boxes`: see verdict."""
    reference = normalise_text(prompt.answer)
    if not reference:
        return unscored(f"the reference answer of {shown(prompt.id)} is empty")
    return verdict(answer, answer.text is not None and normalise_text(answer.text) == reference, boxes=boxes)
