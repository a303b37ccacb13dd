"""avg@n, pass@k and maj@n are three numbers: each against brute force or by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from lockstep.errors import EvaluationError
from lockstep.evaluation.estimates import estimate, item_values, majority, pass_at
from lockstep.types import ItemResult
from tests.evaluation.scores import score


def replies(*answers: str | None, right: str = "7", item: str = "a") -> list[ItemResult]:
    """One item's replies by what was extracted; "!" is unscored."""
    return [
        ItemResult(
            item, i, None if a == "!" else a == right, None, None if a == "!" else a, right, f"text {a}", False, 3
        )
        for i, a in enumerate(answers)
    ]


def test_pass_at_k_is_the_share_of_all_subsets_of_k_that_hold_a_right_one() -> None:
    for n in range(1, 8):
        for right in range(n + 1):
            marks = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(marks, k))
                assert pass_at(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    for wrong in [(4, 5, 1), (4, 2, 5), (4, 2, 0)]:
        with pytest.raises(EvaluationError, match="pass@"):
            pass_at(*wrong)


def test_pass_at_k_is_unbiased_where_the_plain_power_is_not() -> None:
    rng, p, n, k = np.random.default_rng(3), 0.3, 10, 4
    drawn = rng.binomial(n, p, size=20_000)
    truth = 1 - (1 - p) ** k
    assert np.mean([pass_at(n, int(c), k) for c in drawn]) == pytest.approx(truth, abs=0.005)
    assert np.mean([1 - (1 - c / n) ** k for c in drawn]) < truth - 0.02


def test_the_majority_by_hand() -> None:
    assert majority(replies("7", "7", "3", "4")) == 1.0
    assert majority(replies("7", "3", "3", "4")) == 0.0
    assert majority(replies("7", "3")) == 0.5  # a tie of two
    assert majority(replies("7", "3", "4")) == pytest.approx(1 / 3)
    assert majority(replies("7", None, None)) == 1.0  # no answer has no vote
    assert majority(replies(None, None)) == 0.0
    assert majority(replies("3 ", " 3", "7")) == 0.0  # spaces do not split a vote
    assert majority(replies("!", "!")) is None
    assert majority(replies("!", "7")) == 1.0


def test_right_answers_in_other_words_vote_together() -> None:
    both = [
        dataclasses.replace(r, correct=r.extracted in ("1/2", "0.5")) for r in replies("1/2", "0.5", "3", "3", "0.5")
    ]
    assert majority(both) == 1.0


def test_a_verifier_that_extracts_nothing_leaves_the_whole_reply_as_the_vote() -> None:
    silent = [dataclasses.replace(r, extracted=None) for r in replies("7", "3", "3")]
    assert item_values(silent, "maj@3") == {"a": 0.0}  # else the only vote would be the right one's


def test_the_three_numbers_of_one_score_differ() -> None:
    results = [
        *replies("7", "3", "3", "3", item="a"),
        *replies("7", "7", "7", "3", item="b"),
        *replies("3", "4", "5", "6", item="c"),
    ]
    by_name = {name: estimate(results, name, 4) for name in ("avg@4", "pass@4", "maj@4", "pass@2")}
    assert by_name["avg@4"].value == pytest.approx((0.25 + 0.75 + 0) / 3)
    assert by_name["pass@4"].value == pytest.approx(2 / 3)
    assert by_name["maj@4"].value == pytest.approx(1 / 3)
    assert by_name["pass@2"].value == pytest.approx((1 - 3 / 6 + 1 + 0) / 3)
    values = [0.25, 0.75, 0.0]
    assert by_name["avg@4"].se == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))
    assert all(one.low <= one.value <= one.high for one in by_name.values())
    assert {one.items for one in by_name.values()} == {3}


def test_items_with_too_few_scored_replies_are_left_out_of_pass_at_k() -> None:
    results = [*replies("7", "!", item="a"), *replies("7", "3", item="b")]
    assert item_values(results, "pass@2") == {"a": None, "b": 1.0}
    assert estimate(results, "pass@2", 2).items == 1
    assert estimate(results, "avg@2", 2).value == 0.75
    assert estimate(results, "pass@2", 2).se is None  # of one item nothing can be told
    with pytest.raises(EvaluationError, match="no item has enough scored replies for pass@2"):
        estimate(results[:2], "pass@2", 2)
    with pytest.raises(EvaluationError, match="there is no estimate called best@2"):
        item_values(results, "best@2")


def test_a_score_of_one_reply_has_wilsons_interval_and_a_standard_error() -> None:
    one = score([True] * 128 + [False] * 74)
    assert one.estimates[0].name == "pass@1"
    assert one.se == pytest.approx(math.sqrt(128 / 202 * 74 / 202 / 201))
    assert (one.accuracy, one.low, one.high) == (one.estimates[0].value, one.estimates[0].low, one.estimates[0].high)
