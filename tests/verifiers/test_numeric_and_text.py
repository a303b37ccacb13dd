from __future__ import annotations

from lockstep.config import schema
from lockstep.types import Prompt
from lockstep.verifiers.base import MAX_SHOWN
from lockstep.verifiers.build import build_verifier


def ask(answer: str) -> Prompt:
    return Prompt("t/1", ({"role": "user", "content": "?"},), answer)


def test_numeric_grade_of_a_boxed_answer():
    verifier = build_verifier(schema.NumericVerifier())
    grade = verifier.grade(ask("7"), "4 + 3 is, after some thought, \\boxed{7.0}")
    assert grade.reward == 1.0
    assert grade.metrics == {"correct": 1.0, "has_answer": 1.0, "boxed": 1.0, "boxed_in_final": 0.0}
    assert (grade.extracted, grade.method, grade.error) == ("7.0", "boxed", None)


def test_numeric_wrong_missing_and_unreadable_answers_pay_0():
    verifier = build_verifier(schema.NumericVerifier())
    wrong, missing, unreadable = (verifier.grade(ask("7"), reply) for reply in ("\\boxed{8}", "7", "\\boxed{seven}"))
    assert [g.reward for g in (wrong, missing, unreadable)] == [0.0, 0.0, 0.0]
    assert [g.metrics["has_answer"] for g in (wrong, missing, unreadable)] == [1.0, 0.0, 1.0]
    assert [g.method for g in (wrong, missing, unreadable)] == ["boxed", "none", "boxed"]
    assert missing.extracted is None


def test_numeric_fallback_is_a_setting():
    reply = "The answer is 7"
    assert build_verifier(schema.NumericVerifier()).grade(ask("7"), reply).reward == 0.0
    grade = build_verifier(schema.NumericVerifier(fallback="last_number")).grade(ask("7"), reply)
    assert (grade.reward, grade.method, grade.metrics["boxed"]) == (1.0, "last_number", 0.0)


def test_a_box_wins_over_the_fallback():
    verifier = build_verifier(schema.NumericVerifier(fallback="last_number"))
    assert verifier.grade(ask("7"), "\\boxed{8} 7").reward == 0.0
    assert verifier.grade(ask("7"), "\\boxed{} 7").reward == 0.0


def test_numeric_tolerance_is_a_setting():
    reply = "\\boxed{3.15}"
    assert build_verifier(schema.NumericVerifier()).grade(ask("3.14"), reply).reward == 0.0
    assert build_verifier(schema.NumericVerifier(tolerance=0.01)).grade(ask("3.14"), reply).reward == 1.0


def test_a_reference_that_is_no_number_is_an_error_and_not_0():
    grade = build_verifier(schema.NumericVerifier()).grade(ask("a city"), "\\boxed{7}")
    assert grade.reward is None
    assert grade.error == "the reference answer of t/1 is not a number: 'a city'"


def test_text_compares_normalised():
    verifier = build_verifier(schema.TextVerifier())
    assert verifier.grade(ask("New York"), "\\boxed{\\text{new   york}.}").reward == 1.0
    assert verifier.grade(ask("New York"), "\\boxed{York}").reward == 0.0
    assert verifier.grade(ask("New York"), "New York").reward == 0.0
    assert verifier.grade(ask(" "), "\\boxed{}").reward is None


def test_text_last_line():
    verifier = build_verifier(schema.TextVerifier(fallback="last_line"))
    grade = verifier.grade(ask("Paris"), "I think:\nparis\n")
    assert (grade.reward, grade.method, grade.extracted) == (1.0, "last_line", "paris")
    assert verifier.grade(ask("Paris"), "It is Paris").reward == 0.0


def test_long_answers_are_graded_whole_but_stored_cut():
    long = "a" * 1000
    grade = build_verifier(schema.TextVerifier()).grade(ask(long), f"\\boxed{{{long}}}")
    assert grade.reward == 1.0
    assert grade.extracted == "a" * MAX_SHOWN + "…"
