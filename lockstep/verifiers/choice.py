"""The verifier of multiple-choice questions: reads the letter of the chosen option and compares it with the reference."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.extract import read_answer
from lockstep.verifiers.normalise import plain

_LEADS = (
    *("the correct answer is:", "the answer is:", "the correct answer is", "the answer is"),
    *("final answer:", "answer:", "option", "choice"),
)
_MARKS = "*_`"
_ANOTHER = re.compile(
    r"(?<![a-z0-9])([a-z])\s*\)"  # (C), C)
    r"|(?:\b(?:or|and)\b|[,;/])\s*([a-z])(?:[.:](?!\S)|$)"  # or C, / C:
    r"|^([a-z])$"
)
"""Places where the text after an option's letter names an option."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Scores 1 if the reply names the reference's option, or all of its options. Settings: config.schema.ChoiceVerifier."""

    options: int
    several: bool
    fallback: Literal["none", "last_line"]

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        reference = self.read(prompt.answer)
        if not reference:
            kind = "letters" if self.several else "one letter"
            return unscored(
                f"the reference answer of {shown(prompt.id)} is not {kind} of A to {_letter(self.options - 1)}: "
                f"{shown(prompt.answer)!r}"
            )
        answer = read_answer(reply, self.fallback)
        return verdict(answer, answer.text is not None and self.read(answer.text) == reference)

    def read(self, text: str) -> frozenset[str]:
        """Return the options that a written answer names; empty if it names none, one twice, or more than one may be."""
        if len(text) > 2000:
            return frozenset()
        if not self.several:
            letter = self._one(text)
            return frozenset(letter)
        parts = _bare(text).replace(", and ", ",").replace(" and ", ",").replace(";", ",").split(",")
        letters = [self._one(part) for part in parts]
        if any(not letter for letter in letters) or len(set(letters)) < len(letters):
            return frozenset()
        return frozenset(letters)

    def _one(self, text: str) -> str:
        """Return the letter of B, (B), b., **B**, B) Paris, "Answer: B"; "" for anything else."""
        text = _bare(text)
        lower = text.lower()
        lead = next((lead for lead in _LEADS if lower.startswith(lead)), "")
        text = _bare(text[len(lead) :])
        opened = text.startswith("(")
        text = text[1:].lstrip() if opened else text
        letter, rest = text[:1].upper(), text[1:]
        if not letter or not ("A" <= letter <= _letter(self.options - 1)):
            return ""
        if opened and not rest.lstrip().startswith(")"):
            return ""
        if not opened and rest.strip(_MARKS + " .)") and rest[0] not in ".):":
            return ""
        named = _ANOTHER.finditer(rest.lstrip(_MARKS + " .):").lower())
        others = {match[match.lastindex or 0].upper() for match in named} - {letter}
        return "" if any(other <= _letter(self.options - 1) for other in others) else letter


def _bare(text: str) -> str:
    return plain(text).strip(_MARKS + " ")


def _letter(index: int) -> str:
    return chr(ord("A") + index)
