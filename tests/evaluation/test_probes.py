from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from lockstep.commands.preflight import judged
from lockstep.errors import EvaluationError
from lockstep.evaluation.probes import (
    advise,
    format_lines,
    headroom_lines,
    items_to_be_sure,
    mixed_chance,
    probe_format,
    probe_headroom,
)
from lockstep.types import ItemResult
from tests.evaluation.scores import score


def boxed(*boxes: bool | None, cut: int = 0) -> list[ItemResult]:
    """Replies with and without a box; the last `cut` were cut off."""
    results = score([True] * len(boxes)).results
    n = len(results)
    return [
        dataclasses.replace(r, boxed=box, truncated=i >= n - cut)
        for i, (r, box) in enumerate(zip(results, boxes, strict=True))
    ]


def test_twenty_of_twenty_meet_the_rule_but_cannot_tell() -> None:
    probe = probe_format(boxed(*[True] * 20))
    assert (probe.what, probe.passed, probe.sure) == ("boxed", True, False)
    assert probe.interval.low == pytest.approx(0.8389, abs=1e-4)
    assert format_lines(probe)[-1] == (
        "go by the rule (at least 95%), but 20 replies cannot tell: rates from 84% to 100% would fit. 73 replies without a miss "
        "would"
    )
    assert items_to_be_sure() == 73
    assert probe_format(boxed(*[True] * 73)).sure


def test_a_rate_below_is_a_no_go_with_its_reason() -> None:
    probe = probe_format(boxed(*[True] * 10, *[False] * 10))
    assert (probe.passed, probe.sure) == (False, True)
    assert format_lines(probe)[-2:] == [
        "no-go: the rate is below 95%, and so is the whole interval",
        "show the format first: chat.suffix, chat.examples, or a short SFT",
    ]
    cut = probe_format(boxed(*[True] * 10, *[False] * 10, cut=8))
    assert (cut.complete, cut.good_complete) == (12, 10)
    assert format_lines(cut)[-1].startswith("8 of the 10 replies without it were cut off: raise max_tokens")
    narrow = probe_format(boxed(*[True] * 18, *[False] * 2))
    assert (narrow.passed, narrow.sure) == (False, False)


def test_without_boxes_the_found_answer_counts_and_without_both_nothing_can_be_said() -> None:
    found = [dataclasses.replace(r, extracted="7") for r in score([True, False]).results]
    assert (probe_format(found).what, probe_format(found).good, probe_format(found).right) == ("answer found", 2, 1)
    for nothing in (list(score([True]).results), []):
        with pytest.raises(EvaluationError, match="format"):
            probe_format(nothing)


def test_the_chance_of_a_mixed_group_against_all_subsets() -> None:
    for n in range(2, 8):
        for right in range(n + 1):
            marks = [True] * right + [False] * (n - right)
            for group in range(2, n + 1):
                subsets = list(itertools.combinations(marks, group))
                mixed = sum(any(s) and not all(s) for s in subsets) / len(subsets)
                assert mixed_chance(n, right, group) == pytest.approx(mixed)


def test_headroom_by_hand() -> None:
    results = score([[True] * 4, [False] * 4, [True, False, False, False], [True, True, False, False]]).results
    probe = probe_headroom(results, 4)
    assert [one.name for one in probe.passes] == ["pass@1", "pass@2", "pass@4"]
    assert probe.solve_rate == pytest.approx((1 + 0 + 0.25 + 0.5) / 4)
    assert probe.passes[-1].value == 0.75
    assert dict(probe.mixed) == {2: pytest.approx((3 / 6 + 4 / 6) / 4), 4: 0.5}
    assert (probe.never, probe.always) == (0.25, 0.25)
    lines = headroom_lines(probe, 4)
    assert "headroom: 31.2 points from pass@1 to pass@4" in lines
    assert lines[-1].startswith("advice: the difficulty fits: samples_per_prompt=4 (50% mixed)")


@pytest.mark.parametrize(
    ("rate", "group", "says"),
    [
        (0.01, 8, "easier questions"),
        (0.97, 8, "harder questions"),
        (0.3, 2, "samples_per_prompt=2 gives"),
        (0.5, 8, "the difficulty fits"),
    ],
)
def test_advice_follows_from_the_solve_rate(rate: float, group: int, says: str) -> None:
    marks = (np.random.default_rng(1).random((60, 8)) < rate).tolist()
    assert says in advise(probe_headroom(score(marks).results, 8), group)[0]


def test_the_recipes_own_group_size_is_measured() -> None:
    """Items solved 1, 2 or 7 of 8 times. Of 6 of 8 replies all are wrong with chance 7/28 and 1/28, or right with chance 7/28."""
    marks = [[place < right for place in range(8)] for right in (1, 2, 7)]
    probe = probe_headroom(score(marks).results, 8, 6)
    assert dict(probe.mixed)[6] == pytest.approx((21 + 27 + 21) / (3 * 28))
    assert "samples_per_prompt=6 (82% mixed) is enough" in advise(probe, 6)[0]
    check = judged(probe, 6, "")
    assert (check.verdict, "82% of groups of 6 have" in check.found) == ("ok", True)


@pytest.mark.parametrize(
    ("rate", "verdict", "says"), [(0.02, "warn", "easier"), (0.5, "ok", "fits"), (1.0, "warn", "harder")]
)
def test_mixed_groups_are_not_applicable_to_one_sample(rate: float, verdict: str, says: str) -> None:
    """The share of groups of 1 was that of groups of 8."""
    marks = [[item * 8 + place < rate * 160 for place in range(8)] for item in range(20)]
    probe = probe_headroom(score(marks).results, 8, 1)
    (advice,) = advise(probe, 1)
    assert "not applicable to samples_per_prompt=1" in advice
    assert says in advice
    check = judged(probe, 1, advice)
    assert (check.verdict, "groups of 1 have" in check.found) == (verdict, False)


def test_items_that_are_all_or_nothing_need_other_items() -> None:
    probe = probe_headroom(score([[True] * 8] * 10 + [[False] * 8] * 10).results, 8)
    assert "fewer than 50% are mixed" in advise(probe, 8)[0]
    with pytest.raises(EvaluationError, match="at least 2 samples"):
        probe_headroom(score([True]).results, 1)
