"""Expressions that are shown to be different by their values: never those that computer algebra takes for the same."""

from __future__ import annotations

import time

import pytest
from math_verify import verify

from lockstep.verifiers import symbolic
from lockstep.verifiers.expression import _latex, decide
from lockstep.verifiers.symbolic import apart, compare
from tests.verifiers.pairs import pairs

SLOW = (
    "\\sqrt{\\sin(\\sin(\\sin(\\sin(\\sin(x)))))} + x",
    "\\frac{1}{\\sin(\\sin(\\sin(\\sin(\\sin(x)))))}",
    "2^{\\sin(\\sin(\\sin(\\sin(\\sin(x)))))}",
    "".join(f"(x+{i})" for i in range(20)),
    "+".join(f"x^{{{i}}}" for i in range(20)),
    "\\sqrt{2+" * 8 + "3" + "}" * 8,
    "\\frac{1}{\\log(\\log(\\log(2)))}",
)


def read(text: str) -> object:
    (expression,) = symbolic._read(f"\\boxed{{{text}}}")
    return expression


@pytest.mark.parametrize("answer", SLOW)
def test_a_long_wrong_answer_takes_milliseconds(answer: str) -> None:
    assert compare(answer, "42") == "different"  # the reader learns
    used = []
    for _ in range(3):
        start = time.process_time()
        assert compare(answer, "42") == "different"
        used.append(time.process_time() - start)
    assert min(used) < 0.012  # to simplify the difference takes 20 to 120 ms


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("50\\%", "50"),  # math-verify takes them for the same
        ("\\sin^2(x)+\\cos^2(x)", "1"),
        ("\\frac{x^2-1}{x-1}", "x+1"),
        ("x=42", "42"),
        ("\\{42\\}", "42"),
        ("0.3333333", "\\frac{1}{3}"),
        ("0.0000001", "0"),
        ("x", "y"),
        ("n!", "42"),
        ("f(x)", "42"),
        ("\\infty", "42"),
        ("\\frac{1}{0}", "42"),
        ("\\int_0^1 x dx", "42"),
        ("\\frac{1}{1+" * 8 + "x" + "}" * 8, "42"),  # its value takes longer than the proof
    ],
)
def test_nothing_is_said_of_what_is_close_or_no_plain_expression(answer: str, reference: str) -> None:
    assert not apart(read(reference), read(answer))


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("\\{1,2\\}", "(1,2)", False),
        ("\\left\\{1,2\\right\\}", "(1, 2)", False),
        ("x = \\{1,2\\}", "(1,2]", False),
        ("(1,2)", "\\{1,2\\}", False),
        ("(1,2)", "\\lbrace 1,2\\rbrace", False),
        ("(1, 2)", "(1,2)", True),
        ("\\{2,1\\}", "\\{1,2\\}", None),
        ("(2)", "\\{2\\}", None),
        ("1,2", "\\{1,2\\}", None),
    ],
)
def test_a_set_is_no_tuple(answer: str, reference: str, right: bool | None) -> None:
    assert decide(answer, reference, 1e-6) is right


def test_a_space_behind_the_end_of_a_row_does_not_join_the_rows() -> None:
    reference, swapped = "\\begin{pmatrix} x \\\\ y \\end{pmatrix}", "\\begin{pmatrix} y \\\\ x \\end{pmatrix}"
    assert decide(reference.replace(" ", ""), reference, 1e-6) is True
    assert compare(_latex(swapped), _latex(reference)) == "different"
    assert _latex("1\\ 000 \\\\\\ 2") == "1 000 \\\\ 2"


def test_variables_have_different_values() -> None:
    assert apart(read("x+1"), read("y+1"))
    assert apart(read("x-y"), read("y-x"))
    assert not apart(read("(x+y)^2"), read("x^2+2xy+y^2"))


def test_what_is_apart_is_different_to_math_verify_too() -> None:
    """Every seventh of the generated pairs; of all 2,927 that can be read, 315 are apart, and none of those is the same."""
    found = 0
    for pair in pairs()[::7]:
        reference, answer = symbolic._read_reference(pair.reference), symbolic._read(f"\\boxed{{{pair.answer}}}")
        if reference and answer and all(apart(a, b) for a in reference for b in answer):
            found += 1
            assert not verify(list(reference), answer, strict=True, timeout_seconds=None), pair
    assert found >= 20
