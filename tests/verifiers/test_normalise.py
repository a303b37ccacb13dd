from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import schema
from lockstep.types import Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.normalise import MAX_DIGITS, MAX_EXPONENT, close, normalise_text, parse_number
from tests.verifiers.doc_tables import rows


@pytest.mark.parametrize(("written", "value"), rows("numbers"))
def test_documented_numbers(written, value):
    assert parse_number(written) == Fraction(value)


@pytest.mark.parametrize(("written", "why"), rows("not numbers"))
def test_documented_refusals(written, why):
    assert parse_number(written) is None, why


@pytest.mark.parametrize(("written", "compared"), rows("texts"))
def test_documented_texts(written, compared):
    assert normalise_text(written) == compared


def test_the_document_has_the_cases():
    assert [len(rows(name)) for name in ("numbers", "not numbers", "texts")] == [40, 23, 5]


def test_limits_are_exact():
    assert parse_number("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert parse_number("9" * (MAX_DIGITS + 1)) is None
    assert parse_number("." + "9" * (MAX_DIGITS + 1)) is None
    assert parse_number(f"1e{MAX_EXPONENT}") == Fraction(10) ** MAX_EXPONENT
    assert parse_number(f"1e-{MAX_EXPONENT}") == Fraction(1, 10**MAX_EXPONENT)
    assert parse_number(f"1e{MAX_EXPONENT + 1}") is None
    assert parse_number("1e000000000005") == 100_000


NEAR_NUMBERS = [
    *("1e", "e5", "1e5e5", "1e+-5", "1e5.0", "10^", "2 \\times 10^{3", "3 \\times 10", "2 × 2 × 13"),
    *("\\frac", "\\frac1", "\\frac{}{}", "\\frac{1}", "\\frac{1}{2", "\\frac{1}{2}{3}", "\\frac{1}{0}"),
    *("/", "1/", "/2", "%", "-", "+", ".", ",", ",123", "1,234,", "12,34", "1234,567", "$", "$$", "$1$2$"),
    *("\u202e42", "4\u200b2", "\u0662", "½", "Ⅳ", "4²", "1\n2", "\ud800", "\0", "1\0"),
]


@pytest.mark.parametrize("text", NEAR_NUMBERS)
def test_near_numbers_are_not_numbers(text):
    assert parse_number(text) is None


def test_tolerance_is_absolute_up_to_one_and_to_whole_numbers_and_relative_above():
    def near(value: str, answer: str, tolerance: float = 1e-6) -> bool:
        a, b = parse_number(value), parse_number(answer)
        assert a is not None
        assert b is not None
        return close(a, b, tolerance)

    assert near("0.500001", "0.5")  # differs by exactly 1e-6
    assert not near("0.5000011", "0.5")
    assert near("100.5001", "100.5")
    assert not near("100.50011", "100.5")
    assert near("-100.5001", "-100.5")
    assert near("100.000001", "100")
    assert not near("100.0000011", "100")
    assert not near("-100", "100")
    assert near("0.0000009", "0")
    assert near("0.33333333", "1/3")
    assert not near("0.333", "1/3")
    assert not near("0.33333333", "1/3", tolerance=0)
    assert near("0.5", "1/2", tolerance=0)


def test_two_integers_must_be_the_same():
    assert not close(Fraction(10_000_001), Fraction(10_000_000), 1e-6)
    assert close(Fraction(10_000_001), Fraction(10_000_001), 0)


@pytest.mark.parametrize(
    ("answer", "reference"), [("1000000.5", "1000001"), ("123456700000.5", "123456789012"), ("-1999999/2", "-1000000")]
)
@pytest.mark.parametrize(
    "settings",
    [
        schema.NumericVerifier(),
        schema.MathVerifier(),
        schema.SetVerifier(),
        schema.RegexVerifier(pattern=r"boxed\{(.*)\}", compare="number", shown_as="\\boxed{ANSWER}"),
    ],
)
def test_a_fraction_is_not_a_whole_number(settings: schema.Verifier, answer: str, reference: str) -> None:
    verifier = build_verifier(settings)
    for written, reward in ((answer, 0.0), (reference, 1.0)):
        assert verifier.grade(Prompt("p", (), reference), f"\\boxed{{{written}}}").reward == reward


@given(st.fractions(), st.fractions(), st.sampled_from([0.0, 1e-6, 0.1, 2.0]))
def test_close_is_its_formula(value, answer, tolerance):
    if value.denominator == answer.denominator == 1:
        assert close(value, answer, tolerance) == (value == answer)
    else:
        scale = 1 if answer.denominator == 1 else max(1, abs(answer))
        expected = abs(value - answer) <= Fraction(str(tolerance)) * scale
        assert close(value, answer, tolerance) == expected


DRESSES = ["{}", "${}$", " {} ", "{}.", "\\text{{{}}}", "{:,}", "{}.0", "{}/1", "{}e0", "\\frac{{{}}}{{1}}"]


@given(st.integers(), st.sampled_from(DRESSES))
def test_integers_survive_every_dress(number, dress):
    assert parse_number(dress.format(number)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_exactly(number):
    assert parse_number(repr(number)) == Fraction(repr(number))
