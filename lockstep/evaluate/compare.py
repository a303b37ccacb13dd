"""Base against trained: did it change, by how much, and could that be chance?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lockstep.errors import EvaluationError
from lockstep.evaluate.intervals import paired_difference
from lockstep.evaluate.records import comparable
from lockstep.types import ItemResult, Score

ALPHA = 0.05
"""A difference is called an effect below this p."""


class Verdict(StrEnum):
    """What a comparison says, in words."""

    IMPROVED = "improved"
    WORSE = "worse"
    NO_EFFECT = "no effect shown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """trained - base over the items that both scored. Shares, not per cent."""

    base: float
    trained: float
    difference: float
    low: float
    high: float
    """95 % interval of the difference, by bootstrap over items."""
    b: int
    """Items that fell (right before, wrong after)."""
    c: int
    """Items that rose."""
    p: float
    test: str
    n: int
    """Items compared."""
    dropped: int
    """Items left out because a reply could not be scored in one of the two, or is missing there."""
    changed_texts: int
    """Replies whose text differs."""
    identical: bool
    """All replies are the same, word for word."""
    mismatched: tuple[str, ...]
    """Conditions that differ, compared all the same because the user said so."""
    warning: str
    """Empty, or why the numbers should not be believed yet."""

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.difference, self.p)


def verdict_of(difference: float, p: float) -> Verdict:
    """In words: an effect is shown if chance alone would give so large a difference less often than ALPHA."""
    if p >= ALPHA:
        return Verdict.NO_EFFECT
    return Verdict.IMPROVED if difference > 0 else Verdict.WORSE


def compare(base: Score, trained: Score, allow_mismatch: bool = False) -> Comparison:
    """Compare two scores item by item, by id.

    Raises EvaluationError, listing the fields, if the conditions differ beyond the weights and `allow_mismatch` is not
    given, and if the two have no scored item in common.
    """
    mismatched = tuple(comparable(base.conditions, trained.conditions))
    if mismatched and not allow_mismatch:
        a, b = base.conditions, trained.conditions
        lines = "; ".join(f"{name}: {getattr(a, name)} against {getattr(b, name)}" for name in mismatched)
        raise EvaluationError(
            f"the two scores were measured under different conditions ({lines})",
            where="compare",
            fix="evaluate both the same way, or pass --allow-mismatch and say so wherever you report it",
        )
    left, right = _shares(base.results), _shares(trained.results)
    common = [id for id in left if id in right]
    if not common:
        raise EvaluationError("the two scores have no scored item in common", where="compare", fix="use the same items")
    difference = paired_difference([left[id] for id in common], [right[id] for id in common])
    every = {result.id for score in (base, trained) for result in score.results}
    texts, changed = _changed_texts(base.results, trained.results)
    identical = changed == 0 and texts > 0 and len(base.results) == len(trained.results) == texts
    return Comparison(
        base=sum(left[id] for id in common) / len(common),
        trained=sum(right[id] for id in common) / len(common),
        difference=difference.mean,
        low=difference.low,
        high=difference.high,
        b=difference.b,
        c=difference.c,
        p=difference.p,
        test=difference.test,
        n=len(common),
        dropped=len(every) - len(common),
        changed_texts=changed,
        identical=identical,
        mismatched=mismatched,
        warning=_warning(base, trained, identical),
    )


def _warning(base: Score, trained: Score, identical: bool) -> str:
    a, b = base.conditions.weights, trained.conditions.weights
    if not identical or a == b:
        return ""
    return (
        f"weights not loaded? All {len(base.results)} replies are the same, word for word, "
        f"although the weights differ ({a} and {b}). Check that the engine really had the trained weights"
    )


def _shares(results: Sequence[ItemResult]) -> dict[str, float]:
    """For each item with a scored reply, the share of its scored replies that are correct."""
    right: dict[str, list[bool]] = {}
    for result in results:
        if result.correct is not None:
            right.setdefault(result.id, []).append(result.correct)
    return {id: sum(marks) / len(marks) for id, marks in right.items()}


def _changed_texts(base: Sequence[ItemResult], trained: Sequence[ItemResult]) -> tuple[int, int]:
    """Replies that both have, and how many of them differ."""
    before: Mapping[tuple[str, int], str] = {(r.id, r.sample): r.text for r in base}
    pairs = [(before[r.id, r.sample], r.text) for r in trained if (r.id, r.sample) in before]
    return len(pairs), sum(old != new for old, new in pairs)
