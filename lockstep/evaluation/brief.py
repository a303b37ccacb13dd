"""A score without its replies' texts: all that a comparison needs, small enough that a thousand of them load fast."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.evaluation.estimates import by_item, item_values
from lockstep.types import Score

DIGEST = 12
"""Hex digits that stand for a reply's text."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Item by item, in the order of the results."""

    ids: tuple[str, ...]
    digests: tuple[str, ...]
    """12 hex digits for each reply of the item, one after the other."""
    names: tuple[str, ...]
    """Names of the estimates, headline first."""
    values: tuple[tuple[float | None, ...], ...]
    """For each estimate, that of every item; None where too few replies were scored."""


@dataclass(frozen=True, slots=True)
class Brief:
    """A score whose `results` were left on disk, and the marks made of them."""

    score: Score
    marks: Marks

    def values(self, name: str) -> dict[str, float]:
        """Return the items that have this estimate. Raises KeyError if the score was not given it."""
        found = dict(zip(self.marks.names, self.marks.values, strict=True))[name]
        return {id: value for id, value in zip(self.marks.ids, found, strict=True) if value is not None}

    def digests(self) -> dict[str, str]:
        """Return the replies' digests by item."""
        return dict(zip(self.marks.ids, self.marks.digests, strict=True))


def brief_of(score: Score) -> Brief:
    return Brief(score, marks_of(score))


def marks_of(score: Score) -> Marks:
    items = by_item(score.results)
    names = tuple(one.name for one in score.estimates) or (default_estimate(score.samples),)
    values = tuple(tuple(item_values(score.results, name).values()) for name in names)
    return Marks(tuple(items), tuple(digest([r.text for r in replies]) for replies in items.values()), names, values)


def default_estimate(samples: int) -> str:
    """Return the name of the default accuracy, the mean of an item's marks."""
    return "pass@1" if samples == 1 else f"avg@{samples}"


def digest(texts: Sequence[str]) -> str:
    """Return 12 hex digits of BLAKE2b for each text."""
    return "".join(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST // 2).hexdigest() for text in texts
    )
