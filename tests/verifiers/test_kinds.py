# ruff: noqa: E501 - tables
"""The kinds of verifier beyond numbers and text, by tables of answers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import Verifier, workers_of
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.composite import Composite, WeightedPart

ADAPTER: TypeAdapter[schema.Verifier] = TypeAdapter(schema.Verifier)


def made(kind: str, **settings: Any) -> Verifier:
    return build_verifier(ADAPTER.validate_python({"kind": kind, **settings}))


def ask(answer: str, **data: object) -> Prompt:
    return Prompt("t/1", ({"role": "user", "content": "?"},), answer, data=data)


def paid(verifier: Verifier, answer: str, reply: str, **data: object) -> float | None:
    return verifier.grade(ask(answer, **data), reply).reward


# --- choice -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["B", "b", "(B)", "( b )", "B.", "B)", "B) Paris", "B: Paris", "B. Paris", "\\text{B}", "\\text{(B)}", "**B**", "Option B", "Answer: B", "$B$", "B) A city", "(B) Washington, D.C.", "B) and only B)", "(B) or (E)"])  # fmt: skip
def test_a_choice_is_read(text):
    assert paid(made("choice"), "B", f"\\boxed{{{text}}}") == 1.0


@pytest.mark.parametrize("text", ["A", "E", "", "BB", "A, B", "B or A", "A and B", "Bermuda", "(B", "(BC)", "not B", "all", "1", "Ｂ", "B A", "A) B", "B) or C)", "(B)(A)", "B) A", "B. or C.", "B) Paris, C) Rome", "B: x / D: y", "(B) or (a)"])  # fmt: skip
def test_what_is_no_choice_or_another_is_wrong(text):
    assert paid(made("choice"), "B", f"\\boxed{{{text}}}") == 0.0


def test_choices_from_the_last_line():
    verifier = made("choice", fallback="last_line", options=5)
    assert paid(verifier, "E", "It is late.\nThe answer is (E).") == 1.0
    assert paid(verifier, "E", "It may be A.\nE") == 1.0
    assert paid(verifier, "E", "The correct answer is: **E**") == paid(verifier, "E", "The answer is: (E)") == 1.0
    assert paid(verifier, "E", "The answer is: A or E") == 0.0
    assert paid(verifier, "E", "Every option is wrong.") == 0.0
    assert paid(verifier, "A", "A dog barks.") == 0.0
    assert paid(made("choice"), "E", "\\boxed{E}") is None  # there is no E


def test_several_choices():
    verifier = made("choice", several=True)
    for text, reward in {
        "A, C": 1,
        "C, A": 1,
        "C and A": 1,
        "A, and C": 1,
        "(A); (C)": 1,
        "A": 0,
        "A, B, C": 0,
        "A, A, C": 0,
        "A, C, E": 0,
    }.items():
        assert paid(verifier, "A,C", f"\\boxed{{{text}}}") == reward, text


# --- set --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("reference", "text", "right"),
    [
        ("1, 2, 3", "3, 1, 2", True), ("1, 2, 3", "1, 2", False), ("1, 2", "1, 2, 3", False), ("1, 2", "1; 2", True),
        ("1, 2", "\\{2, 1\\}", True), ("1, 2", "{1,2}", True), ("1, 2", "1 and 2", True), ("1, 2", "1, \\text{and } 2", True),
        ("1/2, 3", "3, 0.5", True), ("1, 1, 2", "1, 2", False), ("1, 1, 2", "2, 1, 1", True), ("1, 2", "1, 1, 2", False),
        ("red, blue", "Blue, red", True), ("red, blue", "red", False), ("red, 2", "2, red", True), ("(1,2), (3,4)", "(3, 4), (1, 2)", True),
        ("(1,2), (3,4)", "(2,1), (3,4)", False), ("1, 2", "", False), ("1, 2", "1,, 2", False), ("1, 2", "12", False), ("7", "7", True),
        ("1, 2, 3", "1, 2, and 3", True), ("1, 2, 3", "1; 2; and 3", True), ("1, 2", "1\\text{and}2", True), ("1, 2", "1, and, 2", False),
        ("12, 3", "1{,}2, 3", False), ("12", "1{,}2", False), ("10000, 5", "10{,}000, 5", True), ("band, and", "band, and", True),
        ("10{,}000, 5", "5, 10{,}000", True), ("1, 2", "[1, 2]", True), ("\\frac{1}{2}, -3", "-3; \\frac{1}{2}", True),
    ],
)  # fmt: skip
def test_sets(reference, text, right):
    assert paid(made("set"), reference, f"\\boxed{{{text}}}") == float(right)


def test_repeats_may_be_ignored():
    verifier = made("set", repeats="ignore")
    assert paid(verifier, "1, 2", "\\boxed{2, 1, 1}") == 1.0
    assert paid(verifier, "a, a", "\\boxed{a}") == 1.0
    assert paid(verifier, "1, 2", "\\boxed{1}") == 0.0


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6), st.randoms())
def test_any_order_of_a_set_is_right_and_any_other_set_wrong(numbers, draw):
    verifier, shuffled = made("set"), numbers[:]
    draw.shuffle(shuffled)
    text = ", ".join(map(str, numbers))
    assert paid(verifier, text, f"\\boxed{{{', '.join(map(str, shuffled))}}}") == 1.0
    shuffled[0] += 1
    assert paid(verifier, text, f"\\boxed{{{', '.join(map(str, shuffled))}}}") == 0.0


# --- regex ------------------------------------------------------------------------------------------------------------
def test_an_answer_behind_a_mark():
    verifier = made("regex", pattern=r"####\s*(-?[0-9.,]+)", compare="number", shown_as="#### ANSWER")
    assert paid(verifier, "1234", "So 3.\n#### 1,234") == 1.0
    assert paid(verifier, "1234", "#### 1234\n#### 7") == 0.0  # the last one counts
    assert paid(verifier, "1234", "#### 7 #### 1234") == 1.0
    assert paid(verifier, "1234", "1234") == 0.0
    assert verifier.grade(ask("1234"), "#### 7").extracted == "7"


def test_a_reference_that_is_a_pattern():
    verifier = made("regex")
    assert paid(verifier, "colou?r", "\\boxed{color}") == 1.0
    assert paid(verifier, "colou?r", "\\boxed{colors}") == 0.0  # all of the answer
    assert paid(verifier, "(a", "\\boxed{(a}") is None
    assert paid(verifier, "(a)\\1", "\\boxed{aa}") is None


def test_patterns_are_linear_and_survive_any_text():
    verifier = made("regex", pattern=r"<a>((?:a+)+|7)</a>", shown_as="<a>ANSWER</a>")
    assert paid(verifier, "b", "<a>" + "a" * 4000 + "!") == 0.0
    assert paid(verifier, "7", "\ud800<a>7</a>\0") == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": r"(a)\1", "shown_as": "ANSWER"}, "is not RE2"),
        ({"pattern": r"(?=a)", "shown_as": "ANSWER"}, "is not RE2"),
        ({"pattern": r"(a)(b)", "shown_as": "ANSWER"}, "2 groups"),
        ({"pattern": r"#### (\d+)", "shown_as": "ANSWER"}, "does not read 7"),
        ({"pattern": r"#### (\d+)", "shown_as": "#### 7"}, "does not read 7"),
        ({"compare": "number"}, "have no effect without a pattern"),
    ],
)
def test_patterns_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python({"kind": "regex", **settings})


# --- json -------------------------------------------------------------------------------------------------------------
SCHEMA = {
    "type": "object",
    "required": ["n"],
    "properties": {"n": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


def test_json_is_compared_as_values():
    verifier = made("json")
    for text, right in {
        '{"a": 1, "b": [1, 2]}': True, '{"b":[1,2.0],"a":1.0}': True, '{"a": 1, "b": [2, 1]}': False, '{"a": true, "b": [1, 2]}': False,
        '{"a": 1}': False, '{"a": 1, "a": 1, "b": [1, 2]}': False, "": False, "null": False, "{'a': 1}": False, '{"a": NaN, "b": [1, 2]}': False,
    }.items():  # fmt: skip
        assert paid(verifier, '{"a": 1, "b": [1, 2]}', f"Here:\n```json\n{text}\n```") == float(right), text
    assert paid(verifier, "3", "3") == 1.0  # the whole reply

    assert paid(verifier, "3", "```json\n4\n```\n```json\n3\n```") == 1.0  # the last block
    assert paid(verifier, "{", "{") is None


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("```json\n[1]\n```\nor\n```json\n[2]", "[1]"),  # the last one is not closed
        ("```json\n[2]\n```json\n[1]\n```", "[1]"),
        ("```json [2]``` then ```json [1]```", "[1]"),
        ('```json\n{"a": "```x\\n```"}\n```', '{"a": "```x\\n```"}'),
        ('```json\n{"a": "```json [2] ```"}\n```\nDone.', '{"a": "```json [2] ```"}'),
        ('```json {"a": "\\\\"}``` and "```', '{"a": "\\\\"}'),
        ("```json\n[1]\n``` It's \"so.\n```python\nx = 1\n```", "[1]"),
    ],
)
def test_the_last_closed_block_is_read(reply, right):
    assert paid(made("json"), right, reply) == 1.0


def test_json_must_fit_its_schema():
    verifier = made("json", json_schema=SCHEMA, equal=False)
    for text, right in {
        '{"n": 3}': True,
        '{"n": -1}': False,
        '{"n": "3"}': False,
        '{"n": 3, "m": 1}': False,
        "[]": False,
    }.items():
        assert paid(verifier, "", text) == float(right), text
    assert workers_of(verifier) == 2
    both = made("json", json_schema=SCHEMA)
    assert paid(both, '{"n": 3}', '{"n": 3}') == 1.0
    assert paid(both, '{"n": 4}', '{"n": 3}') == 0.0


def test_json_bombs_are_wrong():
    verifier = made("json", json_schema={"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [{"type": "integer"}, {"type": "array", "oneOf": [{"items": {"$ref": "#/$defs/t"}}, {"items": {"$ref": "#/$defs/t"}, "minItems": 9}]}]}}}, equal=False)  # fmt: skip
    assert paid(verifier, "", "[[1]]") == 1.0
    for text in (
        "[" * 60 + "1" + "]" * 60,
        "[" * 10**5,
        "[" * 65 + "]" * 65,
        "9" * 5000,
        '{"a":' * 10**4,
        '"' + "\\" * 10**5,
        "1e999",
    ):
        assert paid(verifier, "", text) == 0.0, text[:40]
    assert paid(verifier, "", "[1, [2]]") == 1.0


def test_schemas_that_are_none_are_refused():
    with pytest.raises(TaskError, match="the value is not a JSON Schema: 'number or so'"):
        made("json", json_schema={"type": "number or so"})
    with pytest.raises(ValidationError, match="would accept any JSON"):
        ADAPTER.validate_python({"kind": "json", "equal": False})
    for lost in ("http://127.0.0.1:9/x.json", "#/$defs/none"):  # nothing is fetched
        with pytest.raises(TaskError, match=rf"its \$ref {re.escape(lost)} leads nowhere"):
            made("json", json_schema={"items": {"$ref": lost}}, equal=False)


# --- math -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def math():
    verifier = made("math")
    yield verifier
    verifier.pool.close()


@pytest.mark.parametrize(
    ("reference", "text", "right"),
    [
        ("42", "42.0", True), ("42", "43", False), ("x+1", "1+x", True), ("x+1", "x", False), ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("\\frac{x+1}{2}", "\\frac{1}{2}(x+1)", True), ("(0, 1]", "[0, 1]", False), ("42", "6 \\cdot 7", True), ("42", "x = 42", True),
        ("42", "41 = 42", False), ("5", "5 \\approx 6", False), ("5", "5 \\approx 5.0", True), ("\\pi", "3", False), ("x", "y", False), ("\\{1,2\\}", "\\{2,1\\}", True), ("42", "4 2", False), ("50\\%", "0.5", True),
        ("42", "٤٢", False), ("x", "", False), ("12", "\\$12", True), ("0", "0 0", False), ("0", "not 0", False), ("0", "0 \\text{ or } 1", False), ("0", "\\text{not } 0", False),
        ("3.5", "3 \\frac{1}{2}", True), ("-2.75", "-2 \\dfrac{3}{4}", True), ("1.5", "3 \\frac{1}{2}", False), ("3", "3 \\frac{1}{2}", False), ("0.5", "3 \\frac{1}{2}", False),
    ],
)  # fmt: skip
def test_expressions(math, reference, text, right):
    assert paid(math, reference, f"\\boxed{{{text}}}") == float(right)


def test_expressions_say_how_they_were_decided(math):
    grades = {
        text: math.grade(ask("x^2+1"), f"\\boxed{{{text}}}").metrics for text in ("x^{2} + 1", "1+x^2", "9^{9^{9}}")
    }
    assert [(m["symbolic"], m["too_hard"]) for m in grades.values()] == [(1, 0), (1, 0), (0, 1)]
    assert math.grade(ask("\\foo{"), "\\boxed{x}").reward is None


def test_a_number_may_have_to_be_written_out():
    verifier = made("math", written_out=True)
    assert paid(verifier, "391", "\\boxed{17 \\cdot 23}") == 0.0
    assert paid(verifier, "391", "\\boxed{391}") == 1.0


def test_what_exceeds_the_limits_is_wrong_not_unscored():
    verifier = made("math", cpu_seconds=0.005)
    grade = verifier.grade(ask("x"), "\\boxed{\\frac{(x+y)^{20}}{(x-y)^{7}} + \\sqrt{x+\\sqrt{y}}}")
    assert (grade.reward, grade.metrics["too_hard"]) == (0.0, 1.0)


# --- composite --------------------------------------------------------------------------------------------------------
class Fixed:
    def __init__(self, reward: float | None) -> None:
        self.reward = reward

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return Grade(self.reward, error=None if self.reward is not None else "no judge")


def combined(combine: Any, *parts: tuple[float | None, float]) -> Grade:
    return Composite([WeightedPart(f"p{i}", Fixed(r), w) for i, (r, w) in enumerate(parts)], combine).grade(
        ask("7"), ""
    )


SHARES = (0.0, 0.25, 0.5, 1.0)


def test_wrong_never_outranks_right_and_more_never_lowers():
    """Brute force over rewards of three parts, weights 5, 2 and 2."""
    weights = (5.0, 2.0, 2.0)
    grades = {r: combined("weighted", *zip(r, weights, strict=True)) for r in itertools.product(SHARES, repeat=3)}
    right = [grade.reward for grade in grades.values() if grade.metrics["correct"] == 1]
    wrong = [grade.reward for grade in grades.values() if grade.metrics["correct"] == 0]
    assert len(right) == 16
    assert max(wrong) < min(right)
    assert all((grade.reward == 1) == (r == (1, 1, 1)) for r, grade in grades.items())
    for low, high in itertools.product(grades, repeat=2):
        if all(a <= b for a, b in zip(low, high, strict=True)):
            assert grades[low].reward <= grades[high].reward


def test_weights_by_hand():
    grade = combined("weighted", (1.0, 3.0), (0.5, 1.0))
    assert grade.reward == (3 + 0.5) / 4
    assert grade.metrics == {"correct": 1.0, "part_p0": 1.0, "part_p1": 0.5}


def test_all_pays_only_for_all():
    assert combined("all", (1.0, 1), (1.0, 1)).reward == 1.0
    assert combined("all", (1.0, 1), (0.9, 1)).reward == 0.0
    assert combined("all", (1.0, 1), (0.9, 1)).metrics["correct"] == 0.0


def test_unscored_in_one_part_is_unscored():
    for combine in ("all", "weighted"):
        grade = combined(combine, (1.0, 3), (None, 1))
        assert (grade.reward, grade.error) == (None, "part p1: no judge")
    assert combined("weighted", (1.0, 3), (1.5, 1)).error == "part p1 gave 1.5 to t/1, which is not in [0, 1]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"combine": "weighted", "parts": [{"name": "a", "verifier": {"kind": "numeric"}}, {"name": "b", "verifier": {"kind": "text"}}]}, "give a more than 1"),
        ({"parts": [{"name": "a", "verifier": {"kind": "numeric"}}, {"name": "a", "verifier": {"kind": "text"}}]}, "the same name"),
        ({"parts": [{"name": "a", "verifier": {"kind": "numeric"}, "weight": 2}, {"name": "b", "verifier": {"kind": "text"}}]}, "weights have no effect"),
        ({"parts": [{"name": "a", "verifier": {"kind": "numeric"}, "weight": 0}, {"name": "b", "verifier": {"kind": "text"}}]}, "greater than 0"),
        ({"parts": [{"name": "a", "verifier": {"kind": "numeric"}}]}, "at least 2"),
        ({"parts": [{"name": "a", "verifier": {"kind": "composite"}}, {"name": "b", "verifier": {"kind": "text"}}]}, "composite"),
    ],
)  # fmt: skip
def test_compositions_that_break_the_invariants_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python({"kind": "composite", **settings})


def test_a_composition_of_real_verifiers():
    parts = [
        {"name": "right", "verifier": {"kind": "numeric", "fallback": "last_number"}, "weight": 3},
        {"name": "form", "verifier": {"kind": "text"}, "weight": 1},
    ]
    verifier = made("composite", combine="weighted", parts=parts)
    assert [paid(verifier, "7", reply) for reply in ("\\boxed{7}", "it is 7", "\\boxed{8}", "")] == [
        1.0,
        0.75,
        0.0,
        0.0,
    ]
    assert workers_of(verifier) == 0
