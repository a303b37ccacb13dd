"""Exact match of a number."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.extract import Fallback, read_answer
from lockstep.verifiers.normalise import close, parse_number


@dataclass(frozen=True, slots=True)
class Numeric:
    """Scores 1 if the reply's answer is the reference's number, else 0. Settings: config.schema.NumericVerifier."""

    fallback: Fallback
    tolerance: float

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        reference = parse_number(prompt.answer)
        if reference is None:
            return unscored(f"the reference answer of {shown(prompt.id)} is not a number: {shown(prompt.answer)!r}")
        answer = read_answer(reply, self.fallback)
        value = None if answer.text is None else parse_number(answer.text)
        return verdict(answer, value is not None and close(value, reference, self.tolerance))
