"""The verifier `regex`: extracts the answer with a pattern, or tests whether the reply matches it; RE2 runs in linear time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config.verifier import compile_pattern
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.exact import same_number, same_text
from lockstep.verifiers.extract import FINAL_SHARE, REGION, Answer, final_span, read_answer

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Regex:
    """Scores 1 if what the pattern finds is the reference, or if the answer is what the reference's pattern says."""

    pattern: Any
    """Compiled by RE2; None if the reference is the pattern."""
    compare: Literal["text", "number"]
    shown_as: str
    """A right reply, with ANSWER in the place of the answer."""

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        if self.pattern is None:
            return self._match_reference(prompt, reply)
        answer = self.find(reply)
        if self.compare == "number":
            return same_number(prompt, answer, TOLERANCE, boxes=False)
        return same_text(prompt, answer, boxes=False)

    def find(self, reply: str) -> Answer:
        """Return the last match in the last 4096 characters of the final part: its group if there is one, else all of it."""
        start, end = final_span(reply)
        start = max(start, end - REGION)
        last = None
        for match in self.pattern.finditer(_storable(reply[start:end])):
            last = match
        found = last.group(self.pattern.groups) if last is not None else None
        if last is None or found is None:
            return Answer(None, "none")
        return Answer(found.strip(), "pattern", start + last.start() >= (1 - FINAL_SHARE) * len(reply))

    def _match_reference(self, prompt: Prompt, reply: str) -> Grade:
        try:
            pattern = compile_pattern(_storable(prompt.answer))
        except ValueError as error:
            return unscored(f"the reference answer of {shown(prompt.id)}: {error}")
        answer = read_answer(reply, "last_line")
        matches = bool(answer.text) and pattern.fullmatch(_storable(answer.text or "")) is not None
        return verdict(answer, matches)


def _storable(text: str) -> str:
    """Without lone surrogates, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode("utf-8")
