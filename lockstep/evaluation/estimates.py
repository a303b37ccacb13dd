"""Computes avg@n, pass@k and maj@n from the replies to each item, each with its own estimator and standard error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lockstep.errors import EvaluationError
from lockstep.evaluation.intervals import bootstrap_mean, standard_error_of_mean, wilson
from lockstep.types import Estimate, ItemResult


def by_item(results: Sequence[ItemResult]) -> dict[str, list[ItemResult]]:
    """Return the replies of each item, in the order of their samples."""
    items: dict[str, list[ItemResult]] = {}
    for result in results:
        items.setdefault(result.id, []).append(result)
    return {id: sorted(replies, key=lambda reply: reply.sample) for id, replies in items.items()}


def item_values(results: Sequence[ItemResult], name: str) -> dict[str, float | None]:
    """Return the estimate `name` of every item; None where too few of its replies were scored."""
    kind, _, number = name.partition("@")
    k, items = int(number), by_item(results)
    marks = {id: [r.correct for r in replies if r.correct is not None] for id, replies in items.items()}
    match kind:
        case "avg":
            return {id: sum(own) / len(own) if own else None for id, own in marks.items()}
        case "pass":
            return {id: pass_at(len(own), sum(own), k) if len(own) >= k else None for id, own in marks.items()}
        case "maj":
            texts = all(result.extracted is None for result in results)
            return {id: majority(replies, by_text=texts) for id, replies in items.items()}
        case _:
            raise EvaluationError(f"there is no estimate called {name}", fix="use avg@N, pass@K or maj@N")


def pass_at(n: int, right: int, k: int) -> float:
    """Return the unbiased chance that one of k samples is right, given `right` of n samples: 1 - C(n-right, k) / C(n, k).

    1 - (1 - right / n)^k is not that: it is too low for k > 1. Source: Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    Raises EvaluationError unless 0 <= right <= n and 1 <= k <= n.
    """
    if not (0 <= right <= n and 1 <= k <= n):
        raise EvaluationError(
            f"pass@{k} cannot be estimated from {n} samples, {right} of them right",
            where="pass@k",
            fix=f"draw at least {k} samples of each item",
        )
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def majority(replies: Sequence[ItemResult], *, by_text: bool = False) -> float | None:
    """Return 1 if the answer that most scored replies give is right, else 0; ties share. None if none was scored.

    All right answers are one answer, since the verifier found each equal to the reference; wrong ones are told apart by what
    was extracted, or by the whole reply where the verifier extracts nothing (`by_text`). A wrong reply without an answer
    has no vote.
    """
    scored = [reply for reply in replies if reply.correct is not None]
    if not scored:
        return None
    votes: Counter[str | None] = Counter()
    for reply in scored:
        answer = reply.text if by_text else reply.extracted
        if reply.correct:
            votes[None] += 1
        elif answer is not None:
            votes[answer.strip()] += 1
    most = max(votes.values(), default=0)
    return (votes[None] == most) / sum(count == most for count in votes.values()) if most else 0.0


def estimate(results: Sequence[ItemResult], name: str, samples: int) -> Estimate:
    """Return the estimate over all items that have one, its standard error over items, and its 95 % interval.

    Wilson's interval for one reply an item, a bootstrap over items for several. Raises EvaluationError if no item has one.
    """
    values = [value for value in item_values(results, name).values() if value is not None]
    if not values:
        raise EvaluationError(
            f"no item has enough scored replies for {name}",
            where="evaluation",
            fix="find out why replies are unscored, draw more samples, or use a lower k",
        )
    se = standard_error_of_mean(values)
    interval = wilson(round(sum(values)), len(values)) if samples == 1 else bootstrap_mean(values)
    mean = sum(values) / len(values)
    return Estimate(name, mean, se if math.isfinite(se) else None, interval.low, interval.high, len(values))
