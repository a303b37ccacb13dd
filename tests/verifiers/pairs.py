# ruff: noqa: E501 - long lists of pairs
r"""More than two thousand pairs of a reference and an answer, right and wrong, as they come up in mathematics data sets.

Deterministic. What is right is not said here: the pairs are for comparing two graders.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Pair:
    """A reference and an answer that is boxed."""

    family: str
    reference: str
    answer: str


def pairs() -> list[Pair]:
    """All of them, each once."""
    draw = random.Random(20)
    found = [pair for family in FAMILIES for pair in family(draw)]
    return list(dict.fromkeys(found))


def integers(draw: random.Random) -> Iterator[Pair]:
    for i in range(220):
        n = draw.choice([draw.randrange(-20, 100), draw.randrange(10**6), draw.randrange(10**12)])
        for answer in (
            str(n),
            str(n + draw.choice([1, -1, 10])),
            f"{n}.0",
            f"{n:,}".replace(",", "{,}"),
            f"+{n}" if i >= 10 else f"{n}.",
        ):
            yield Pair("integers", str(n), answer)


def decimals(draw: random.Random) -> Iterator[Pair]:
    for _ in range(80):
        value = draw.randrange(1, 10**6)
        text = f"{value / 1000:.3f}"
        yield Pair("decimals", text, text.rstrip("0") + "0")
        yield Pair("decimals", text, f"{(value + 1) / 1000:.3f}")
        yield Pair("decimals", text, f"\\frac{{{value}}}{{1000}}")
        yield Pair("decimals", text, f"{value / 1000 + 1e-7:.7f}")


def fractions(draw: random.Random) -> Iterator[Pair]:
    for _ in range(90):
        value, k = Fraction(draw.randrange(-50, 50) or 7, draw.randrange(2, 60)), draw.randrange(2, 9)
        a, b = value.numerator, value.denominator
        for answer in (
            f"{a}/{b}",
            f"\\frac{{{a * k}}}{{{b * k}}}",
            f"\\dfrac{{{a}}}{{{b}}}",
            f"\\frac{{{a + 1}}}{{{b}}}",
            f"{float(value):.4f}",
        ):
            yield Pair("fractions", f"\\frac{{{a}}}{{{b}}}", answer)


def percents(draw: random.Random) -> Iterator[Pair]:
    for _ in range(25):
        n = draw.randrange(1, 100)
        for answer in (f"{n}\\%", f"{n}", f"{n / 100}", f"{n + 1}\\%"):
            yield Pair("percents", f"{n}\\%", answer)


def roots(draw: random.Random) -> Iterator[Pair]:
    for _ in range(30):
        a, b, c = draw.randrange(2, 9), draw.randrange(2, 8), draw.randrange(1, 9)
        for answer in (
            f"\\sqrt{{{a * a * b}}}",
            f"{a}\\sqrt{{{b + 1}}}",
            f"\\sqrt{{{b}}} \\cdot {a}",
            f"\\frac{{{a * b}}}{{\\sqrt{{{b}}}}}",
        ):
            yield Pair("roots", f"{a}\\sqrt{{{b}}}", answer)
        yield Pair("roots", f"{c} + \\sqrt{{{b}}}", f"\\sqrt{{{b}}} + {c}")
        yield Pair("roots", f"{c} + \\sqrt{{{b}}}", f"{c} - \\sqrt{{{b}}}")
        yield Pair(
            "roots",
            f"\\frac{{1}}{{{c} + \\sqrt{{{b}}}}}",
            f"\\frac{{{c} - \\sqrt{{{b}}}}}{{{c * c - b}}}" if c * c != b else f"{c}",
        )


def polynomials(draw: random.Random) -> Iterator[Pair]:
    for _ in range(45):
        a, b = draw.randrange(1, 9), draw.randrange(1, 9)
        reference = f"x^2 + {a + b}x + {a * b}"
        for answer in (
            f"(x+{a})(x+{b})",
            f"{a * b} + {a + b}x + x^{{2}}",
            f"x^2 + {a + b}x + {a * b + 1}",
            f"y^2 + {a + b}y + {a * b}",
        ):
            yield Pair("polynomials", reference, answer)
        yield Pair("polynomials", f"\\frac{{n(n+{a})}}{{2}}", f"\\frac{{n^2+{a}n}}{{2}}")
        yield Pair("polynomials", f"2^{{n+{a}}}", f"{2**a} \\cdot 2^n")


def constants(draw: random.Random) -> Iterator[Pair]:
    for _ in range(30):
        a, b = draw.randrange(1, 12), draw.randrange(2, 12)
        yield Pair("constants", f"\\frac{{{a}\\pi}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}\\pi")
        yield Pair("constants", f"\\frac{{{a}\\pi}}{{{b}}}", f"{3.14159265 * a / b:.4f}")
        yield Pair("constants", f"{a}e^{{{b}}}", f"e^{{{b}}} \\cdot {a}")
        yield Pair("constants", f"\\log_{{2}} {a}", f"\\frac{{\\ln {a}}}{{\\ln 2}}")
        yield Pair("constants", f"{a} + {b}i", f"{b}i + {a}")
        yield Pair("constants", f"{a} + {b}i", f"{a} - {b}i")


def lists(draw: random.Random) -> Iterator[Pair]:
    for _ in range(30):
        a, b, c = sorted(draw.sample(range(-9, 30), 3))
        for reference, answer in (
            (f"{a}, {b}, {c}", f"{c}, {a}, {b}"), (f"{a}, {b}, {c}", f"{a}, {b}"), (f"\\{{{a}, {b}\\}}", f"\\{{{b}, {a}\\}}"),
            (f"({a}, {b})", f"({b}, {a})"), (f"({a}, {b})", f"\\left({a}, {b}\\right)"), (f"[{a}, {b})", f"({a}, {b})"),
            (f"({a}, {b}) \\cup ({b}, {c})", f"({b}, {c}) \\cup ({a}, {b})"), (f"[{a}, \\infty)", f"x \\ge {a}"),
            (f"x = {a}", f"{a}"), (f"{a}", f"x = {a}"), (f"y = {a}x + {b}", f"y = {b} + {a}x"), (f"{a} < x < {b}", f"({a}, {b})"),
        ):  # fmt: skip
            yield Pair("lists", reference, answer)


def wordings(draw: random.Random) -> Iterator[Pair]:
    for _ in range(30):
        n = draw.randrange(2, 500)
        for reference, answer in (
            (f"{n}", f"{n}\\text{{ cm}}"), (f"{n}", f"\\${n}"), (f"{n}", f"{n}^\\circ"), (f"{n}", f"{n} \\text{{ or }} {n + 1}"),
            (f"{n}\\text{{ cm}}", f"{n}"), (f"{n}", f"{n} = {n}"), (f"{n}", f"{n - 1} + 1"), (f"{n}", f"{n} \\cdot 1"), (f"{n}", f"\\text{{{n}}}"),
            (f"{n}", f"{n}, {n + 1}"), (f"{n}", f"{n} {n}"), (f"{n}", f"{n - 1} = {n}"), ("\\text{even}", "\\text{odd}"), ("\\text{even}", "even"),
            ("\\text{(B)}", "B"), ("A", "B"), (f"{n}:{n + 1}", f"{2 * n}:{2 * n + 2}"),
        ):  # fmt: skip
            yield Pair("wordings", reference, answer)


FAMILIES = (integers, decimals, fractions, percents, roots, polynomials, constants, lists, wordings)
