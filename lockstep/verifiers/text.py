"""Exact match of text."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.extract import Fallback, read_answer
from lockstep.verifiers.normalise import normalise_text


@dataclass(frozen=True, slots=True)
class Text:
    """Scores 1 if the reply's answer is the reference's text after normalise_text, else 0. Settings: TextVerifier."""

    fallback: Fallback

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        reference = normalise_text(prompt.answer)
        if not reference:
            return unscored(f"the reference answer of {shown(prompt.id)} is empty")
        answer = read_answer(reply, self.fallback)
        return verdict(answer, answer.text is not None and normalise_text(answer.text) == reference)
