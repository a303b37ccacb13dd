from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.errors import EvaluationError
from lockstep.evaluation.brief import Brief, Marks
from lockstep.evaluation.compare import Verdict, compare, power_line, verdict_of
from lockstep.evaluation.estimates import estimate
from lockstep.evaluation.intervals import mcnemar, noise_floor, paired_difference, smallest_detectable
from lockstep.evaluation.records import comparable
from lockstep.evaluation.table import comparison_table, score_line, table_lines
from lockstep.report.tables import conditions
from lockstep.types import Conditions
from tests.evaluation.scores import CONDITIONS, score

A, B = "a" * 16, "b" * 16


def test_compare_by_hand() -> None:
    base = score([True, True, False, False, False, False, False, False, False, True], weights=A)
    trained = score([True, False, True, True, True, True, True, True, True, True], weights=B, step=50)
    c = compare(base, trained)
    assert (c.b, c.c, c.n, c.dropped) == (1, 7, 10, 0)
    assert (c.base, c.trained) == (0.3, 0.9)
    assert c.difference == pytest.approx(0.6)
    assert c.p == mcnemar(1, 7) == 0.0703125  # 2 * (1 + 8) / 256
    assert c.verdict is Verdict.NO_EFFECT
    assert c.low <= c.difference <= c.high
    assert c.test == "mcnemar-exact"
    assert c.changed_texts == 10
    assert c.identical is False


def test_verdicts_in_words() -> None:
    low, high = score([False] * 8, weights=A), score([True] * 8, weights=B)
    assert str(compare(low, high).verdict) == "improved"
    assert str(compare(high, low).verdict) == "worse"
    assert str(compare(low, score([False] * 8, weights=B)).verdict) == "no effect shown"


def test_items_are_paired_by_id_not_by_place() -> None:
    base = score([True, False, False, False], weights=A)
    trained = score([True, False, False, False], weights=B)
    reversed_ = dataclasses.replace(trained, results=tuple(reversed(trained.results)))
    assert compare(base, reversed_) == compare(base, trained)
    assert compare(base, reversed_).b == 0


def test_unscored_items_are_left_out_and_counted() -> None:
    c = compare(score([True, None, False, True]), score([True, True, True, None], weights=B))
    assert (c.n, c.dropped, c.b, c.c) == (2, 2, 0, 1)
    assert (c.base, c.trained) == (0.5, 1.0)


def test_several_samples_compare_shares_of_items() -> None:
    base = score([[True, False], [False, False], [True, True], [True, None]])
    trained = score([[True, True], [True, False], [False, True], [True, True]], weights=B)
    c = compare(base, trained)
    assert (c.b, c.c, c.n) == (1, 2, 4)
    assert c.base == (0.5 + 0 + 1 + 1) / 4
    assert c.difference == pytest.approx(0.125)
    assert c.test == "sign-flip"


# --- conditions -----------------------------------------------------------------------------------------------------
def test_every_condition_but_the_weights_stands_against_a_comparison() -> None:
    for field in dataclasses.fields(Conditions):
        value = getattr(CONDITIONS, field.name)
        other = dataclasses.replace(CONDITIONS, **{field.name: value + 1 if isinstance(value, int) else value + "x"})
        assert comparable(CONDITIONS, other) == ([] if field.name == "weights" else [field.name])


def test_compare_refuses_and_lists_what_differs() -> None:
    base, other = score([True]), score([True], weights=B, numerics="mxfp4-w4a4", max_tokens=32)
    with pytest.raises(EvaluationError, match="numerics: fp32 against mxfp4-w4a4; max_tokens: 16 against 32") as caught:
        compare(base, other)
    assert caught.value.exit_code == 7
    assert "--allow-mismatch" in caught.value.fix


def test_with_the_users_word_it_compares_and_says_so() -> None:
    c = compare(score([True, False]), score([True, True], weights=B, numerics="bf16"), allow_mismatch=True)
    assert c.mismatched == ("numerics",)
    assert c.c == 1


def test_scores_of_other_items_have_nothing_to_compare() -> None:
    other = score([True], weights=B, data_hash="f" * 16)
    other = dataclasses.replace(other, results=(dataclasses.replace(other.results[0], id="else"),))
    with pytest.raises(EvaluationError, match="no scored item in common"):
        compare(score([True]), other, allow_mismatch=True)


# --- too identical --------------------------------------------------------------------------------------------------
def with_texts_of(a: object, b: object) -> object:
    texts = [r.text for r in b.results]  # type: ignore[attr-defined]
    results = tuple(dataclasses.replace(r, text=t) for r, t in zip(a.results, texts, strict=True))  # type: ignore[attr-defined]
    return dataclasses.replace(a, results=results)  # type: ignore[type-var]


def test_same_replies_of_other_weights_raise_the_alarm() -> None:
    base = score([True, False, True] * 7)
    trained = with_texts_of(score([True, False, True] * 7, weights=B, step=50), base)
    c = compare(base, trained)  # type: ignore[arg-type]
    assert c.identical
    assert c.changed_texts == 0
    assert "weights not loaded?" in c.warning
    assert A in c.warning
    assert B in c.warning


def test_same_replies_of_the_same_weights_are_as_they_should_be() -> None:
    base = score([True, False, True])
    c = compare(base, dataclasses.replace(base, step=50))
    assert c.identical
    assert c.warning == ""


def test_one_other_reply_is_enough_for_no_alarm() -> None:
    base = score([True, False, True])
    trained = with_texts_of(score([True, False, True], weights=B), base)
    results = (*trained.results[:2], dataclasses.replace(trained.results[2], text="other"))  # type: ignore[attr-defined]
    c = compare(base, dataclasses.replace(trained, results=results))  # type: ignore[type-var, arg-type]
    assert (c.identical, c.changed_texts, c.warning) == (False, 1, "")


def test_a_part_of_the_items_is_not_identical() -> None:
    base = score([True, False, True])
    part = with_texts_of(score([True, False, True], weights=B), base)
    part = dataclasses.replace(part, results=part.results[:2])  # type: ignore[attr-defined, type-var]
    assert compare(base, part).identical is False  # type: ignore[arg-type]


def test_an_item_is_worth_a_share_of_the_scored_items() -> None:
    """Unscored replies are in no number; one item is worth 100 points, not 1e+02."""
    some, one = score([True, False, *[None] * 6]), score([True])
    assert score_line(some).endswith("; 2 of 8 items scored, 1 item = 50 points")
    assert "2 of 8 items scored, 1 item = 50 points" in conditions(some)
    assert score_line(one).endswith("; 1 item = 100 points")
    assert power_line(compare(one, score([False], weights=B))).startswith(
        "1 item = 100 points; with 1 item, of which 1"
    )


# --- the table ------------------------------------------------------------------------------------------------------
def test_the_table_pairs_by_mode_in_the_order_of_the_base() -> None:
    base = [score([False] * 20), score([False] * 20, mode="sampled(T=1)")]
    trained = [score([False] * 20, weights=B, mode="sampled(T=1)"), score([True] * 20, weights=B)]
    rows = comparison_table(base, trained)
    assert [(row.mode, row.comparison.verdict.value) for row in rows] == [
        ("greedy", "improved"),
        ("sampled(T=1)", "no effect shown"),
    ]
    lines = table_lines(rows)
    assert len(lines) == 5
    assert lines[3].startswith(
        "greedy: 1 item = 5 points; with 20 items, of which 20 changed, a difference under 50.0 points"
    )
    assert lines[0].split()[:3] == ["task", "mode", "items"]
    cells = [
        "0.0 % ± 0.0 [0.0, 16.1]",
        "100.0 % ± 0.0 [83.9, 100.0]",
        "+100.0 [+100.0, +100.0]",
        "+20 -0",
        "<0.0001",
        "improved",
    ]
    assert all(cell in lines[1] for cell in cells)


def test_the_table_shows_warnings_and_what_was_left_out() -> None:
    base = score([True, None, True] * 7)
    trained = with_texts_of(score([True, True, True] * 7, weights=B), base)
    lines = table_lines(comparison_table([base], [trained]))  # type: ignore[list-item]
    assert lines[3].startswith("greedy: alarm: weights not loaded?")
    assert lines[4].startswith("greedy: 7 items left out")


def test_the_table_says_once_that_nothing_was_trained_and_cuts_long_names() -> None:
    base = [score([True] * 4, task="Guess/" + "x" * 200), score([True] * 4, mode="sampled(T=1)")]
    rows = comparison_table(base, [dataclasses.replace(one, step=20) for one in base])
    lines = table_lines(rows, "all rewards were equal")
    assert sum("the weights are still those of the base" in line for line in lines) == 1
    assert "all rewards were equal" in lines[-1]
    assert max(map(len, lines[:3])) < 170


def test_other_numbers_of_items_are_said_when_scores_are_refused() -> None:
    with pytest.raises(EvaluationError, match="60 items against 4"):
        compare(score([True] * 60), score([True] * 4, weights=B, data_hash="f" * 16))


def test_the_table_refuses_a_mode_without_partner_and_doubles() -> None:
    one = score([True])
    with pytest.raises(EvaluationError, match="only one of the two sides has a score of greedy of sums"):
        comparison_table([one], [])
    with pytest.raises(EvaluationError, match="mode greedy: there are two trained scores"):
        comparison_table([one], [one, one])


# --- what is said ---------------------------------------------------------------------------------------------------
def test_a_changed_prompt_suffix_is_conditions_that_differ_and_no_improvement() -> None:
    base = score([False] * 40)
    better = score([True] * 40, weights=B, prompt_suffix=" Think step by step.", template_hash="f" * 16)
    with pytest.raises(EvaluationError, match="conditions differ") as caught:
        compare(base, better)
    assert (
        "template_hash: eeeeeeeeeeeeeeee against ffffffffffffffff; prompt_suffix: '' against ' Think step by step.'"
        in str(caught.value)
    )
    c = compare(base, better, allow_mismatch=True)
    assert (c.difference, c.p < 1e-9) == (1.0, True)
    assert str(c.verdict) == "conditions differ"


def test_another_model_is_what_is_asked_about_and_gets_a_verdict() -> None:
    c = compare(score([False] * 20), score([True] * 20, weights=B, model="other"), allow_mismatch=True)
    assert (c.mismatched, str(c.verdict)) == (("model",), "improved")


def test_what_an_old_record_does_not_say_is_not_held_against_it() -> None:
    silent = score([True], reasoning_effort=None, prompt_suffix=None)
    assert comparable(silent.conditions, score([True], prompt_suffix=" now", weights=B).conditions) == []


def test_the_noise_floor_is_the_least_difference_that_the_test_calls_an_effect() -> None:
    for changed in range(41):
        effects = [
            m for m in range(changed % 2, changed + 1, 2) if mcnemar((changed - m) // 2, (changed + m) // 2) < 0.05
        ]
        assert noise_floor(changed, 100) == (effects[0] / 100 if effects else None)
    assert noise_floor(5, 100) is None
    assert noise_floor(6, 100) == 0.06
    # Of 202 items 47 changed (23.5 %, as notes X-7 have it): the exact test needs 15 more up than down.
    assert noise_floor(47, 202) == pytest.approx(15 / 202)


def test_a_verdict_agrees_with_the_floor_that_is_printed() -> None:
    for up in range(6, 30):
        marks = [False] * up + [True] * 8 + [False] * 60
        after = [True] * up + [False] * 8 + [False] * 60
        c = compare(score(marks), score(after, weights=B))
        assert c.floor is not None
        assert (c.verdict is Verdict.NO_EFFECT) == (abs(c.difference) < c.floor - 1e-12)
        assert (
            f"with {len(marks)} items, of which {up + 8} changed, a difference under {100 * c.floor:.1f} points"
            in power_line(c)
        )


def test_each_estimate_is_compared_by_its_own_values() -> None:
    base = [[True, False, False, False]] * 10
    after = [[True, True, True, True]] * 5 + [[False] * 4] * 5
    a, b = (score(marks, weights=w, mode="avg@4(T=1,n=4)") for marks, w in ((base, A), (after, B)))
    a, b = (
        dataclasses.replace(s, estimates=tuple(estimate(s.results, name, 4) for name in ("avg@4", "pass@4")))
        for s in (a, b)
    )
    assert compare(a, b).difference == pytest.approx(0.25)
    assert compare(a, b, estimate="pass@4").difference == pytest.approx(-0.5)
    with pytest.raises(EvaluationError, match="has no estimate maj@4; it has avg@4, pass@4"):
        compare(a, b, estimate="maj@4")


def test_same_replies_in_other_numerics_raise_the_alarm() -> None:
    base = score([True, False, True])
    other = dataclasses.replace(base, conditions=dataclasses.replace(base.conditions, numerics="mxfp4-w4a4"))
    assert compare(base, other, allow_mismatch=True).warning.startswith(
        "numerics not applied? All 3 replies are the same"
    )


# --- simulations: is the verdict right as often as it should be? -----------------------------------------------------
def verdicts(rng: np.random.Generator, pairs: int, fall: float, rise: float) -> list[Verdict]:
    """Of pairs of 1000 items each: half right before; a share `fall` goes wrong, a share `rise` becomes right."""
    out = []
    for _ in range(pairs):
        before = rng.random(1000) < 0.5
        draw = rng.random(1000)
        after = np.where(before, draw >= 2 * fall, draw < 2 * rise)
        d = paired_difference(before.astype(float).tolist(), after.astype(float).tolist())
        out.append(verdict_of(d.difference, d.p))
    return out


def test_a_null_result_is_called_an_effect_in_at_most_five_of_a_hundred() -> None:
    found = verdicts(np.random.default_rng(11), 1000, fall=0.10, rise=0.10)
    wrong = sum(v is not Verdict.NO_EFFECT for v in found)
    assert wrong <= 50
    assert wrong >= 20  # a test that never says yes would pass the line above


def test_three_points_are_mostly_found() -> None:
    # A tenth of the items changes: 3.5 % fall, 6.5 % rise.
    assert smallest_detectable(1000, 0.1, power=0.83) == pytest.approx(0.03, abs=0.0005)
    found = verdicts(np.random.default_rng(12), 1000, fall=0.035, rise=0.065)
    assert sum(v is Verdict.IMPROVED for v in found) >= 800
    assert sum(v is Verdict.NO_EFFECT for v in found) <= 200
    assert not any(v is Verdict.WORSE for v in found)


def planted(marks: NDArray[np.bool_], weights: str) -> Brief:
    """A score of so many items, as it would be read of a file."""
    return Brief(ONE[weights], Marks(IDS, DIGESTS[weights], ("pass@1",), (tuple(marks.astype(float).tolist()),)))


IDS = tuple(f"item/{i}" for i in range(1000))
DIGESTS = {weights: tuple(f"{weights[0]}{i:011x}" for i in range(1000)) for weights in (A, B)}
ONE = {weights: score([True], weights=weights) for weights in (A, B)}


def test_four_tenths_of_a_point_observed_on_a_thousand_items_is_never_called_an_effect() -> None:
    # Notes X-7: gpt-oss -0.40 points (p 0.783). Whatever the share that changes, ±4 items of 1000 are no effect.
    rng = np.random.default_rng(14)
    for i in range(400):
        margin, fewer = (4, -4)[i % 2], int(rng.integers(1, 200))
        b, c = (fewer, fewer + 4) if margin > 0 else (fewer + 4, fewer)
        before = rng.permutation(np.repeat([True, False], 500))
        fall, rise = rng.choice(np.flatnonzero(before), b, False), rng.choice(np.flatnonzero(~before), c, False)
        after = before.copy()
        after[fall], after[rise] = False, True
        found = compare(planted(before, A), planted(after, B))
        assert (found.b, found.c, found.difference) == (b, c, pytest.approx(margin / 1000))
        assert found.verdict is Verdict.NO_EFFECT
        assert found.low < found.difference < found.high


def test_a_null_result_of_several_samples_is_called_an_effect_in_about_five_of_a_hundred() -> None:
    rng = np.random.default_rng(13)
    wrong = 0
    for _ in range(300):
        p = rng.random(60)
        before, after = (rng.random((4, 60)) < p).T, (rng.random((4, 60)) < p).T
        c = compare(score(before.tolist()), score(after.tolist(), weights=B))
        wrong += c.verdict is not Verdict.NO_EFFECT
    assert 4 <= wrong <= 25  # 15 expected, deviation 3.8
