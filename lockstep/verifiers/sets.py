"""The verifier of answers with several parts, which may come in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.extract import MAX_DEPTH, read_answer
from lockstep.verifiers.normalise import close, normalise_text, parse_number, plain

MAX_ITEMS = 256
_GROUPING = "\0"
"""Stands for {,}, which separates no items."""
_BRACKETS = (("\\{", "\\}"), ("\\lbrace", "\\rbrace"), ("{", "}"), ("[", "]"))


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a list: its numbers in order of size, and the other items with their counts."""

    numbers: tuple[Fraction, ...]
    texts: Counter[str]


@dataclass(frozen=True, slots=True)
class UnorderedSet:
    """Scores 1 if the answer has the reference's items and no others. Settings: config.schema.SetVerifier."""

    fallback: Literal["none", "last_line"]
    tolerance: float
    repeats: Literal["count", "ignore"]

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        reference = self.read(prompt.answer)
        if reference is None:
            return unscored(f"the reference answer of {shown(prompt.id)} is no list: {shown(prompt.answer)!r}")
        answer = read_answer(reply, self.fallback)
        items = None if answer.text is None else self.read(answer.text)
        return verdict(answer, items is not None and self.same(items, reference))

    def read(self, text: str) -> Items | None:
        """Return the items of a written list; None if it is empty, has an empty item, or is beyond the limits."""
        parts = split_items(text)
        if not parts:
            return None
        values = [(part, parse_number(part)) for part in parts]
        numbers = sorted(value for _, value in values if value is not None)
        texts = Counter("".join(normalise_text(part).split()) for part, value in values if value is None)
        if self.repeats == "ignore":
            numbers, texts = sorted(set(numbers)), Counter(set(texts))
        return Items(tuple(numbers), texts)

    def same(self, items: Items, reference: Items) -> bool:
        """Return whether both have the same items: numbers in order of size within the tolerance, texts exactly."""
        return (
            items.texts == reference.texts
            and len(items.numbers) == len(reference.numbers)
            and all(close(a, b, self.tolerance) for a, b in zip(items.numbers, reference.numbers, strict=True))
        )


def split_items(text: str) -> list[str]:
    r"""Return the items of a list, without its outer braces; [] if it has an empty item or more than 256.

    Items are separated by semicolons if there is one outside brackets, else by commas and by " and "; never inside brackets:
    "(1, 2), (3, 4)" has two items. A comma between digits separates too: thousands are written 10{,}000.
    """
    body = plain(text.replace("{,}", _GROUPING).replace("\\text{and}", " and "))
    body = body.replace("\\left", "").replace("\\right", "")
    for opening, closing in _BRACKETS:
        if body.startswith(opening) and body.endswith(closing) and encloses(body, opening, closing):
            body = body[len(opening) : -len(closing)].strip()
            break
    pieces = _split(body, ";")
    if len(pieces) == 1:
        pieces = _split(body.replace(", and ", ",").replace(",and ", ",").replace(" and ", ","), ",")
    items = [piece.strip().removeprefix("and ").replace(_GROUPING, "{,}") for piece in pieces]
    return items if all(items) and len(items) <= MAX_ITEMS else []


def encloses(text: str, opening: str, closing: str) -> bool:
    """Return whether the first bracket closes at the end of the text."""
    inner = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for char in inner:
        depth += (char in "{[(") - (char in "}])")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, separator: str) -> list[str]:
    """Text split at a character outside brackets; [""] if they nest deeper than MAX_DEPTH."""
    pieces, start, depth = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == separator and depth <= 0:
            pieces.append(text[start:i])
            start = i + 1
        if depth > MAX_DEPTH:
            return [""]
    return [*pieces, text[start:]]
