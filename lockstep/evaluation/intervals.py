"""Confidence intervals and tests of an accuracy, or of a difference of two. Pure functions; resampling is seeded by arguments."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import EvaluationError
from lockstep.seeds import seed_for

CONFIDENCE = 0.95
"""Confidence of every interval."""
ALPHA = 0.05
"""Limit of p below which a difference is called an effect."""
RESAMPLES = 2000
"""Number of resamples of a bootstrap interval."""
FLIPS = 10_000
"""Number of random sign flips of a permutation test: its smallest p is 0.0001."""
Floats: TypeAlias = NDArray[np.float64]
_CELLS = 1 << 20
"""Number of signs drawn together; bounds memory whatever the number of items."""
_ALL_SIGNS = 12
"""Up to this many differences, all 4096 signs are tried instead of random ones."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval, in the unit of its quantity (shares, not per cent)."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """trained - base over the same items: the mean, and its 95 % interval by bootstrap over items. Shares, not per cent."""

    difference: float
    low: float
    high: float
    b: int
    """Number of items that fell: right before and wrong after, or a smaller share of right replies after."""
    c: int
    """Number of items that rose."""
    p: float
    """Two-sided p: the chance of a difference at least as large if there were none."""
    test: str
    """"mcnemar-exact" for one sample an item, "sign-flip" otherwise."""
    floor: float | None
    """With this many items changed, a smaller difference (as a share) cannot be told from noise; None if none can."""


def wilson(correct: int, n: int) -> Interval:
    """Return the score interval of a share (Wilson 1927, JASA 22:209). Unlike p ± 2 se it stays in [0, 1] and is valid near
    both ends.

    Raises EvaluationError unless 0 <= correct <= n and n > 0.
    """
    if n <= 0 or not 0 <= correct <= n:
        raise EvaluationError(
            f"there is no interval for {correct} correct replies of {n}",
            where="wilson",
            fix="pass n of at least 1, and correct from 0 to n",
        )
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    p, z2 = correct / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At both ends the formula gives exactly 0 and 1; rounding would give 1e-17 less.
    low = 0.0 if correct == 0 else max(0.0, centre - half)
    high = 1.0 if correct == n else min(1.0, centre + half)
    return Interval(low, high)


def bootstrap_mean(values: Sequence[float] | Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Return the percentile interval of the mean over items (Efron 1979), each value the mean of an item's samples.

    Items, not samples, are resampled: samples of one item are not independent. Raises EvaluationError without values.
    """
    means = _resampled_means(_array(values), seed, resamples)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p of McNemar's test: the chance that a fair coin is at least as uneven over b + c changed
    items.

    Sums the binomial with whole numbers, so it is exact for any count. 1.0 when nothing changed. Source: McNemar 1947,
    Psychometrika 12:153; the exact form is a two-sided sign test.
    """
    if b < 0 or c < 0:
        raise EvaluationError(f"counts of items cannot be negative: {b}, {c}", where="mcnemar")
    n, few = b + c, min(b, c)
    term = total = 1
    for i in range(1, few + 1):
        term = term * (n - i + 1) // i
        total += term
    return min(1.0, float(2 * total / 2**n))


def paired_difference(
    base: Sequence[float], trained: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """Compare two evaluations of the same items; place i of both is one item, its value the share of right replies.

    Values that are all 0 or 1 are tested by `mcnemar`, shares by `sign_flip`. The interval is a bootstrap over items.
    It and the test answer slightly different questions and may disagree when p is near 0.05: verdicts use p.

    Raises EvaluationError if the lengths differ or there are no items.
    """
    if len(base) != len(trained):
        raise EvaluationError(
            f"the two evaluations have different numbers of items: {len(base)} and {len(trained)}",
            where="paired difference",
            fix="pass the values of the same items, in the same order",
        )
    left, right = _array(base), _array(trained)
    d = right - left
    fell, rose = int((d < 0).sum()), int((d > 0).sum())
    both = np.concatenate([left, right])
    binary = bool(((both == 0) | (both == 1)).all())
    p = mcnemar(fell, rose) if binary else sign_flip(d, seed=seed)
    interval = bootstrap_mean(d, seed=seed, resamples=resamples)
    test = "mcnemar-exact" if binary else "sign-flip"
    floor = noise_floor(fell + rose, len(d)) if binary else _flip_floor(d, p)
    return Difference(float(d.mean()), interval.low, interval.high, fell, rose, p, test, floor)


def noise_floor(changed: int, n: int) -> float | None:
    """Return the smallest difference (as a share) that `mcnemar` calls an effect when `changed` of n items changed.

    None with five or fewer changed items: even all of them changing the same way is not rare enough.
    """
    least = _least_margin(changed)
    return None if least is None else least / n


def _flip_floor(d: Floats, p: float) -> float | None:
    """Return approximately the smallest mean difference that `sign_flip` calls an effect: 1.96 of its deviations under chance,
    which is too small for few items. It is placed on the same side of the observed difference as p indicates.
    """
    if np.count_nonzero(d) <= 5:  # the rarest of 2^5 sign patterns and its opposite: p = 0.0625
        return None
    usual, found = 1.96 * math.sqrt(float((d * d).sum())) / len(d), abs(float(d.mean()))
    return min(usual, found) if p < ALPHA else max(usual, math.nextafter(found, 1.0))


@cache
def _least_margin(changed: int) -> int | None:
    margins = range(changed % 2, changed + 1, 2)
    place = bisect_left(
        margins, True, key=lambda margin: mcnemar((changed - margin) // 2, (changed + margin) // 2) < ALPHA
    )
    return margins[place] if place < len(margins) else None


def sign_flip(differences: Sequence[float] | Floats, *, seed: int = 0) -> float:
    """Return two-sided p that paired differences are equally often positive and negative, by flipping their signs at random.

    If an item's samples come from one distribution in both evaluations, its difference is as likely as its negative, so the
    test is exact for any number of items, where a bootstrap p is too small for few (three equal differences: 0.25 here, 0
    there). For differences -1, 0, 1 it is McNemar's test. All signs are tried for up to 12 differences; random ones give (1 +
    hits) / (1 + FLIPS), which is never 0. 1.0 without any difference. Source: Fisher 1935, The Design of Experiments, §21;
    Davison and Hinkley 1997, §4.3.
    """
    d = _array(differences)
    d = d[d != 0]
    if not len(d):
        return 1.0
    # Sums of shares such as 1/3 differ in the last bit by their order; equal sums must count as equal.
    bound = abs(float(d.sum())) - 1e-9 * float(np.abs(d).sum())
    if len(d) <= _ALL_SIGNS:
        every = (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1) * 2 - 1
        return float((np.abs(every @ d) >= bound).mean())
    rng = _rng("sign-flip", seed)
    hits, rows = 0, max(1, _CELLS // len(d))
    for start in range(0, FLIPS, rows):
        signs = rng.integers(0, 2, size=(min(rows, FLIPS - start), len(d))) * 2 - 1
        hits += int((np.abs(signs @ d) >= bound).sum())
    return (1 + hits) / (1 + FLIPS)


def standard_error_of_mean(values: Sequence[float]) -> float:
    """Return the standard error of the mean of item means: sample deviation / sqrt(n). nan for a single item."""
    array = _array(values)
    return float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.nan


def item_points(n: int) -> float:
    """Return the weight of one item, in percentage points. Example: 200 items: 0.5."""
    if n <= 0:
        raise EvaluationError("the evaluation has no items", where="item points", fix="evaluate at least one item")
    return 100 / n


def worth(n: int) -> str:
    """Say what one item is worth. Examples: "1 item = 0.5 points", "1 item = 12.5 points"."""
    return f"1 item = {item_points(n):.3g} points"


def smallest_detectable(n: int, changing: float, power: float = 0.8) -> float | None:
    """Return the smallest true difference (as a share, to 0.0001) that `mcnemar` finds in n items with probability `power`.

    `changing` is the share of items that change in either direction. None if even all of them changing the same way would not
    be found so often. Exact: the number that changes is binomial, and so is that of the ones that rise among them.
    """
    if n <= 0 or not 0 < changing <= 1 or not 0.5 <= power < 1:
        raise EvaluationError(
            f"{n} items of which a share of {changing} changes, power {power}", where="smallest detectable difference"
        )
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    away = 6 * math.sqrt(n * changing * (1 - changing))
    counts = range(max(0, math.floor(n * changing - away)), min(n, math.ceil(n * changing + away)) + 1)
    weighed = [(float(_binomial(logs, n, np.array([k]), changing)[0]), k, _least_rises(logs, k)) for k in counts]

    def found(difference: float) -> float:
        rise = (1 + difference / changing) / 2
        rises = ((w, k, _likely(k, rise, least)) for w, k, least in weighed)
        return sum(w * float(_binomial(logs, k, counts, rise).sum()) for w, k, counts in rises)

    low, high = 0.0, changing
    if found(high) < power:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) >= power else (middle, high)
    return high


def _likely(n: int, share: float, least: int) -> NDArray[np.int64]:
    """Return the counts of n trials from `least` on, but for those so far from the mean that together they are below 1e-15."""
    away = 9 * math.sqrt(n * share * (1 - share)) + 30
    return np.arange(max(least, math.floor(n * share - away)), min(n, math.ceil(n * share + away)) + 1)


def _binomial(logs: Floats, n: int, counts: NDArray[np.int64], share: float) -> Floats:
    """Return the probability of each of `counts` in n trials; `logs` are the logarithms of the factorials."""
    certain = np.finfo(np.float64).tiny
    chances = counts * math.log(max(share, certain)) + (n - counts) * math.log(max(1 - share, certain))
    return np.asarray(np.exp(logs[n] - logs[counts] - logs[n - counts] + chances), dtype=np.float64)


def _least_rises(logs: Floats, changed: int) -> int:
    """Return how many changed items must rise for `mcnemar` to call it an effect; more than `changed` if no number suffices."""
    counts = _likely(changed, 0.5, changed // 2)
    tails = _binomial(logs, changed, counts, 0.5)[::-1].cumsum()
    return int(counts[-1]) + 1 - int((2 * tails < ALPHA).sum())


def resolution(n: int, changing: float = 0.2) -> str:
    """Say what a paired comparison of n items can show if a share `changing` of them changes."""
    head = f"{worth(n)}; with {changing:.0%} of items changing, "
    d = smallest_detectable(n, changing)
    if d is None:
        return head + "no difference is found 4 times in 5: too few items"
    return head + f"a true difference of {100 * d:.1f} points is found 4 times in 5"


def _array(values: Sequence[float] | Floats) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise EvaluationError(
            "a mean needs at least one value, and only finite values",
            where="evaluation",
            fix="leave out unscored items",
        )
    return array


def _rng(name: str, seed: int) -> np.random.Generator:
    # Philox is counter-based: the same key gives the same stream on every platform.
    return np.random.Generator(np.random.Philox(key=seed_for(name, seed)))


def _resampled_means(values: Floats, seed: int, resamples: int) -> Floats:
    """Return means of `resamples` draws of len(values) values with replacement.

    Drawn as counts of the distinct values, which is the same distribution: shares of a few samples have few of them.
    """
    n = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    drawn = _rng("bootstrap", seed).multinomial(n, counts / n, size=resamples)
    return np.asarray(drawn @ distinct / n, dtype=np.float64)
