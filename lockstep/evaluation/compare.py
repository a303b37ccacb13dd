"""Compares two scores item by item: the difference, its interval, a significance test, and warnings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from lockstep.errors import EvaluationError
from lockstep.evaluation.brief import DIGEST, Brief, brief_of
from lockstep.evaluation.intervals import ALPHA, Difference, paired_difference, worth
from lockstep.evaluation.records import comparable
from lockstep.types import Conditions, Score

FEW = 20
"""Fewer replies than this are often the same after a small update: that is no sign of weights that were not loaded."""


class Verdict(StrEnum):
    """Result of a comparison, in words."""

    IMPROVED = "improved"
    WORSE = "worse"
    NO_EFFECT = "no effect shown"
    CONDITIONS = "conditions differ"
    """The two were not measured the same way: the difference is due to conditions and weights together."""


@dataclass(frozen=True, slots=True)
class Comparison(Difference):
    """The difference of two scores over the items that both scored."""

    estimate: str
    """Name of the compared estimate. Example: "pass@1"."""
    base: float
    trained: float
    n: int
    """Number of items compared."""
    dropped: int
    """Number of items left out because a reply could not be scored in one of the two, or is missing there."""
    texts: int
    """Number of replies that both have."""
    changed_texts: int
    """Number of replies whose text differs."""
    identical: bool
    """True if all replies are the same, word for word."""
    fell: tuple[str, ...]
    rose: tuple[str, ...]
    mismatched: tuple[str, ...]
    """Conditions that differ, compared anyway at the user's request."""
    warning: str
    """Reason why the numbers should not be believed yet; empty if there is none."""

    @property
    def verdict(self) -> Verdict:
        """Verdict on the weights. Different conditions allow none, except between models."""
        if set(self.mismatched) - {"model"}:
            return Verdict.CONDITIONS
        return verdict_of(self.difference, self.p)


def verdict_of(difference: float, p: float) -> Verdict:
    """Return the verdict: an effect is shown if chance alone gives so large a difference less often than ALPHA."""
    if p >= ALPHA:
        return Verdict.NO_EFFECT
    return Verdict.IMPROVED if difference > 0 else Verdict.WORSE


def compare(
    base: Score | Brief, trained: Score | Brief, allow_mismatch: bool = False, estimate: str | None = None
) -> Comparison:
    """Compare two scores item by item, by id; by their first estimate, or another that both have.

    Raises EvaluationError, listing the fields, if the conditions differ beyond the weights and `allow_mismatch` is not
    given, and if the two have no scored item in common.
    """
    first, second = (one if isinstance(one, Brief) else brief_of(one) for one in (base, trained))
    a, b = first.score.conditions, second.score.conditions
    mismatched = tuple(comparable(a, b))
    if mismatched and not allow_mismatch:
        raise EvaluationError(
            f"the conditions differ, so the scores' difference would say nothing about the weights: {differences(a, b)}"
            + (
                ""
                if first.score.items == second.score.items
                else f"; {first.score.items} items against {second.score.items}"
            ),
            where=_sources(first, second),
            fix="evaluate both under the same conditions, or pass --allow-mismatch and report the mismatch with the result",
        )
    name = estimate or first.marks.names[0]
    left, right = _values(first, name), _values(second, name)
    common = [id for id in left if id in right]
    if not common:
        raise EvaluationError(
            "the two evaluations have no scored item in common",
            where=_sources(first, second),
            fix="evaluate both on the same held-out items (task, role and number)",
        )
    before, after = [left[id] for id in common], [right[id] for id in common]
    texts, changed = _changed_texts(first, second)
    same_length = len(first.marks.ids) == len(second.marks.ids)
    identical = changed == 0 and texts > 0 and same_length and texts == sum(map(len, first.marks.digests)) // DIGEST
    return Comparison(
        **asdict(paired_difference(before, after)),
        estimate=name,
        base=sum(before) / len(common),
        trained=sum(after) / len(common),
        n=len(common),
        dropped=len({*first.marks.ids, *second.marks.ids}) - len(common),
        texts=texts,
        changed_texts=changed,
        identical=identical,
        fell=tuple(id for id, x, y in zip(common, before, after, strict=True) if y < x),
        rose=tuple(id for id, x, y in zip(common, before, after, strict=True) if y > x),
        mismatched=mismatched,
        warning=identical_warning(a, b, texts) if identical else "",
    )


def differences(a: Conditions, b: Conditions) -> str:
    """Return each condition that differs, with both values. Example: "prompt_suffix: '' against ' Think.'; seed: 1 against 2" """
    return "; ".join(
        f"{name}: {_shown(getattr(a, name))} against {_shown(getattr(b, name))}" for name in comparable(a, b)
    )


def identical_warning(a: Conditions, b: Conditions, replies: int) -> str:
    """Return a warning if the replies of two scores are all the same, word for word, but should differ; "" otherwise."""
    head = f"All {replies} replies are the same, word for word, although"
    if a.weights != b.weights and replies < FEW:
        return f"{head} the weights differ ({a.weights} and {b.weights}); so few replies often are: ask more items to be sure"
    if a.weights != b.weights:
        return (
            f"weights not loaded? {head} the weights differ ({a.weights} and {b.weights}). Each score's proof says that the "
            "engine had its weights; after few steps or at a small learning rate greedy replies can be the same: look at a "
            "sampled mode too"
        )
    if a.numerics != b.numerics:
        return (
            f"numerics not applied? {head} one was computed in {a.numerics} and one in {b.numerics}. "
            "Check that the engine really used it: the number of quantised layers is printed"
        )
    return ""


def power_line(c: Comparison) -> str:
    """Return the power of the comparison. Example: "with 202 items, of which 47 changed, a difference under 7.4 points cannot
    be …".
    """
    items = "1 item" if c.n == 1 else f"{c.n} items"
    head = f"{worth(c.n)}; with {items}, of which {c.b + c.c} changed,"
    if c.floor is None:
        return f"{head} no difference can be told from noise"
    return f"{head} a difference under {100 * c.floor:.1f} points cannot be told from noise"


def _shown(value: object) -> str:
    return repr(value) if value in ("", None) or (isinstance(value, str) and value != value.strip()) else str(value)


def _sources(first: Brief, second: Brief) -> str:
    return f"{first.score.source or 'first score'} and {second.score.source or 'second score'}"


def _values(brief: Brief, name: str) -> dict[str, float]:
    try:
        return brief.values(name)
    except KeyError:
        raise EvaluationError(
            f"the score of mode {brief.score.conditions.mode} has no estimate {name}; it has {', '.join(brief.marks.names)}",
            where=brief.score.source or "comparison of two scores",
            fix="compare an estimate that both scores have",
        ) from None


def _changed_texts(base: Brief, trained: Brief) -> tuple[int, int]:
    """Return the number of replies that both have, and how many of them differ."""
    before, texts, changed = base.digests(), 0, 0
    for id, after in trained.digests().items():
        other = before.get(id, "")
        size = min(len(other), len(after))
        texts += size // DIGEST
        if other[:size] != after[:size]:
            changed += sum(other[i : i + DIGEST] != after[i : i + DIGEST] for i in range(0, size, DIGEST))
    return texts, changed
