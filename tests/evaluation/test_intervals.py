from __future__ import annotations

import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest

from lockstep.errors import EvaluationError
from lockstep.evaluation.intervals import (
    bootstrap_mean,
    item_points,
    mcnemar,
    paired_difference,
    resolution,
    sign_flip,
    smallest_detectable,
    standard_error_of_mean,
    wilson,
)


# --- wilson ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3 (score without continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_newcombes_table(correct: int, n: int, low: float, high: float) -> None:
    got = wilson(correct, n)
    assert (got.low, got.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilson_is_symmetric_stays_inside_and_is_exact_at_the_ends() -> None:
    for n in (1, 7, 200):
        for k in range(n + 1):
            a, b = wilson(k, n), wilson(n - k, n)
            assert a.low == pytest.approx(1 - b.high, abs=1e-12)
            assert 0 <= a.low <= k / n <= a.high <= 1
    assert wilson(0, 9).low == 0.0
    assert wilson(9, 9).high == 1.0


def test_wilson_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for p in (0.1, 0.5, 0.8):
        counts = rng.binomial(200, p, size=2000)
        cover = np.mean([wilson(int(k), 200).low <= p <= wilson(int(k), 200).high for k in counts])
        assert 0.93 < cover < 0.97


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_what_is_no_share(correct: int, n: int) -> None:
    with pytest.raises(EvaluationError, match="there is no interval for"):
        wilson(correct, n)


# --- mcnemar --------------------------------------------------------------------------------------------------------
def test_mcnemar_equals_counting_every_sequence_of_coin_flips() -> None:
    for n in range(1, 11):
        heads = [sum(flips) for flips in itertools.product((0, 1), repeat=n)]
        for b in range(n + 1):
            as_uneven = sum(abs(h - n / 2) >= abs(b - n / 2) for h in heads)
            assert mcnemar(b, n - b) == float(Fraction(as_uneven, 2**n))


def test_mcnemar_known_numbers() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 5) == 0.0625  # 2 / 2⁵: five changes can never show an effect at 0.05
    assert mcnemar(0, 6) == 0.03125
    # scipy.stats.binomtest(b, b + c).pvalue of scipy 1.x
    assert mcnemar(10, 25) == mcnemar(25, 10) == pytest.approx(0.016673847800120715, rel=1e-12)
    assert mcnemar(121, 59) == pytest.approx(4.4344492637551645e-06, rel=1e-12)
    assert mcnemar(5000, 5300) == pytest.approx(0.003215819673645239, rel=1e-12)


def test_mcnemar_of_large_counts_is_finite_and_near_the_normal_value() -> None:
    # z with continuity correction = (300 - 1) / sqrt(10300) = 2.94613
    assert mcnemar(5000, 5300) == pytest.approx(math.erfc(2.94613 / math.sqrt(2)), rel=2e-3)
    assert 0.0 <= mcnemar(0, 5000) < 1e-300


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(EvaluationError):
        mcnemar(-1, 2)


# --- bootstrap ------------------------------------------------------------------------------------------------------
def test_bootstrap_of_a_constant_has_no_width() -> None:
    assert bootstrap_mean([0.25] * 9) == bootstrap_mean([0.25] * 9)
    assert (bootstrap_mean([0.25] * 9).low, bootstrap_mean([0.25] * 9).high) == (0.25, 0.25)


def test_the_floor_of_shares_and_the_verdict_agree() -> None:
    rng = np.random.default_rng(0)
    for trial in range(200):
        n = int(rng.integers(8, 60))
        d = np.zeros(n)
        changed = int(rng.integers(1, n))
        d[:changed] = rng.choice([-0.25, 0.125, 0.25, 0.5], changed)
        found = paired_difference([0.5] * n, (0.5 + d).tolist(), seed=trial, resamples=50)
        if found.floor is None:
            assert found.p >= 0.05
        else:
            assert (abs(found.difference) >= found.floor) == (found.p < 0.05)


def test_bootstrap_depends_on_its_seed_alone() -> None:
    values = np.random.default_rng(1).random(50).tolist()
    first = bootstrap_mean(values, seed=3)
    np.random.default_rng().random(10)
    assert bootstrap_mean(values, seed=3) == first
    assert bootstrap_mean(values, seed=4) != first


def test_bootstrap_equals_one_that_draws_items_by_index() -> None:
    values = np.random.default_rng(2).choice([0.0, 0.125, 0.5, 1.0], size=80)
    rng = np.random.default_rng(3)
    means = [values[rng.integers(0, 80, 80)].mean() for _ in range(20_000)]
    got = bootstrap_mean(values.tolist(), resamples=20_000)
    assert got.low == pytest.approx(np.quantile(means, 0.025), abs=0.004)
    assert got.high == pytest.approx(np.quantile(means, 0.975), abs=0.004)


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_means_of_nothing_or_of_nan_are_refused(values: list[float]) -> None:
    with pytest.raises(EvaluationError, match="only finite values"):
        bootstrap_mean(values)


# --- sign flip ------------------------------------------------------------------------------------------------------
def exact_sign_flip(d: list[Fraction]) -> float:
    every = itertools.product((1, -1), repeat=len(d))
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in every]
    return sum(s >= abs(sum(d)) for s in sums) / len(sums)


@pytest.mark.parametrize(
    "d",
    [
        [Fraction(1, 2)] * 3,
        [Fraction(1, 3), Fraction(1, 3), Fraction(-2, 3), Fraction(1), Fraction(1, 3)],
        [Fraction(1, 8), Fraction(3, 8), Fraction(5, 8), Fraction(-1, 8), Fraction(7, 8), Fraction(1, 4)],
        [Fraction(1), Fraction(-1)],
    ],
)
def test_sign_flip_equals_trying_all_signs(d: list[Fraction]) -> None:
    assert sign_flip([float(x) for x in d]) == exact_sign_flip(d)


def test_random_signs_agree_with_all_signs() -> None:
    d = [Fraction(i, 4) for i in (1, 2, 3, -1, 1, -1, 2, 3, -2, 1, 1, -3, 1)]
    random = np.mean([sign_flip([float(x) for x in d], seed=seed) for seed in range(20)])
    assert random == pytest.approx(exact_sign_flip(d), abs=0.005)


def test_sign_flip_of_whole_items_is_mcnemars_test() -> None:
    assert sign_flip([1.0] * 25 + [-1.0] * 10 + [0.0] * 65) == pytest.approx(mcnemar(10, 25), abs=0.004)


def test_sign_flip_of_no_difference_is_one_and_never_zero_otherwise() -> None:
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([0.5]) == 1.0
    assert sign_flip([0.5, 0.5, 0.5, 0.0]) == 0.25  # 2 of 8
    assert sign_flip([1.0] * 60) == 1 / 10_001


# --- paired difference ----------------------------------------------------------------------------------------------
def test_paired_difference_by_hand() -> None:
    base = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    trained = [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    got = paired_difference(base, trained)
    assert (got.b, got.c, got.difference, got.test) == (1, 4, 0.375, "mcnemar-exact")
    assert got.p == mcnemar(1, 4) == 0.375  # 2 * (1 + 5) / 32
    assert got.low < 0.375 < got.high


def test_paired_difference_of_shares_flips_signs() -> None:
    got = paired_difference([0.5, 0.25, 1.0, 0.0], [0.75, 0.25, 0.5, 1.0])
    assert (got.b, got.c, got.test) == (1, 2, "sign-flip")
    assert got.difference == pytest.approx(0.1875)
    assert got.p == 0.75  # of the sums ±1/4 ±1/2 ±1, all but ±1/4 are as far from 0 as the 3/4 that was seen


def test_paired_difference_is_antisymmetric() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 2, 100).astype(float).tolist(), rng.integers(0, 2, 100).astype(float).tolist()
    there, back = paired_difference(x, y), paired_difference(y, x)
    assert (there.b, there.c, there.p) == (back.c, back.b, back.p)
    assert there.difference == -back.difference


def test_lists_of_other_lengths_are_refused() -> None:
    with pytest.raises(EvaluationError, match="different numbers of items: 2 and 1"):
        paired_difference([1.0, 0.0], [1.0])


# --- what a set can show --------------------------------------------------------------------------------------------
def test_standard_errors_by_hand() -> None:
    # deviation of 0, 1, 2 is 1
    assert standard_error_of_mean([0.0, 1.0, 2.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(standard_error_of_mean([1.0]))


def test_one_item_in_points() -> None:
    assert item_points(200) == 0.5
    assert item_points(18) == pytest.approx(5.556, abs=1e-3)


@pytest.mark.parametrize(("n", "changing"), [(30, 0.4), (60, 0.2), (60, 1.0)])
def test_smallest_detectable_difference_is_found_four_times_in_five(n: int, changing: float) -> None:
    """Every outcome with its probability: items that fall, that rise, and that stay."""
    d = smallest_detectable(n, changing)
    assert d is not None

    def found(difference: float) -> float:
        fall, rise = (changing - difference) / 2, (changing + difference) / 2
        return sum(
            math.comb(n, b) * math.comb(n - b, c) * fall**b * rise**c * (1 - fall - rise) ** (n - b - c)
            for b in range(n + 1)
            for c in range(b, n + 1 - b)
            if mcnemar(b, c) < 0.05
        )

    assert found(d - 0.001) < 0.8 <= found(d) < 0.81


def test_the_smallest_detectable_difference_of_many_items_takes_no_seconds() -> None:
    began = time.process_time()
    found = [smallest_detectable(n, changing) for n, changing in ((1000, 0.05), (100_000, 0.2), (100_000, 1.0))]
    assert found == [0.020410156250000006, 0.00400390625, 0.0089111328125], "as counted over every outcome"
    assert time.process_time() - began < 3


def test_too_few_items_detect_nothing() -> None:
    assert smallest_detectable(18, 0.2) is None
    assert resolution(18).endswith("too few items")
    assert resolution(200) == (
        "1 item = 0.5 points; with 20% of items changing, a true difference of 9.1 points is found 4 times in 5"
    )
    with pytest.raises(EvaluationError):
        smallest_detectable(0, 0.2)
