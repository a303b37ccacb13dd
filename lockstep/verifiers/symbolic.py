"""The second stage of the verifier `math`: decides with math-verify, in a limited worker, whether LaTeX expressions are equal.

https://github.com/huggingface/Math-Verify. Only its LaTeX reader is used: its reader for plain text evaluates Python.
Text for sympy is parsed by no_eval.py.
Its own time limits are alarm signals, which work only in the main thread; they are off, and the worker's limits hold.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from lockstep.verifiers import no_eval

Verdict: TypeAlias = Literal["equal", "different", "no answer", "no reference"]
WARM = (
    ("\\frac{x+1}{2}", "\\frac{1+x}{2}"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("(1,2]", "(1,3]"),
)
"""Compared when a worker starts, so that no answer is charged for what sympy loads at first use."""
ROUNDING = 6
"""Decimals to which floating-point numbers are compared; math-verify's default."""
PRECISION = 15
"""Digits to which two numbers without variables are compared; math-verify's default."""
FIRST_POINT, POINT_STEP = 1.3718281828, 0.2141592653
"""Point at which expressions are evaluated: the first variable's value, and how much larger each next one's is."""
MAX_WORK = 300
"""Parts of an expression that are evaluated at most; fractions in fractions in fractions have more."""
CLEARLY = 1e-3
"""Values that differ by so much of the larger one, or of 1, are of different expressions: far above any rounding."""


def load() -> Callable[[Any], object]:
    """Return the function that answers calls in a worker. Raises TaskError if math-verify is not installed."""
    from lockstep.errors import TaskError

    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise TaskError(
            f"math-verify cannot be imported: {error}",
            where="verifier math",
            fix="pip install 'lockstep-rl[math]'",
        ) from error
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    for answer, reference in WARM:
        compare(answer, reference)
    no_eval.replace_parser()
    no_eval.forbid_code()
    return lambda call: compare(call["answer"], call["reference"])


def compare(answer: str, reference: str) -> Verdict:
    """Return whether math-verify finds both equal. It may never end, and may take any amount of memory."""
    from math_verify import verify

    right = _read_reference(reference)
    if not right:
        return "no reference"
    read = _read(f"\\boxed{{{answer}}}")
    if not read:
        return "no answer"
    if all(apart(a, b) for a in right for b in read):
        return "different"
    same = verify(
        list(right), read, float_rounding=ROUNDING, numeric_precision=PRECISION, strict=True, timeout_seconds=None
    )
    return "equal" if same else "different"


def apart(a: Any, b: Any) -> bool:
    """Return whether two expressions are shown to be different by their values at a point, which takes a millisecond.

    To simplify their difference, as math-verify does next, takes a hundred times that where it is long, and cannot make zero of
    it: what has another value somewhere is not the same expression. So this is only ever said where math-verify would say the
    same after all its work; where a value cannot be had, or the two are close, or one of them is more than numbers, variables,
    powers and elementary functions (a percentage, a set, an equation, a name), nothing is said.
    """
    from sympy import Symbol

    if isinstance(a, Symbol) or isinstance(b, Symbol) or max(_work(a), _work(b)) > MAX_WORK:
        return False
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {name: FIRST_POINT + POINT_STEP * i for i, name in enumerate(names)}
    try:
        x, y = (complex(one.evalf(PRECISION, subs=point)) for one in (a, b))
    except (ArithmeticError, AttributeError, TypeError, ValueError, RecursionError):
        return False
    size = max(1.0, abs(x), abs(y))
    return math.isfinite(size) and abs(x - y) > CLEARLY * size


def _work(node: Any) -> float:
    """Return how many parts are evaluated for the value of an expression: twice those below a fraction bar, as evalf does it.

    Infinite for anything that does not mean at any positive point what it means in general; so a variable that is known to be
    an integer.
    """
    import sympy
    from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

    functions = (sympy.exp, sympy.log, sympy.Abs, TrigonometricFunction, InverseTrigonometricFunction)
    if isinstance(node, sympy.Symbol):
        plain = node.is_commutative and node.is_integer is None and node.is_positive is not False
        return 1.0 if plain else math.inf
    if isinstance(node, (sympy.Rational, sympy.Float, sympy.NumberSymbol)) or node is sympy.I:
        return 1.0
    if not isinstance(node, (sympy.Add, sympy.Mul, sympy.Pow, *functions)):
        return math.inf
    below = 1.0 + sum(map(_work, node.args))
    return 2.0 * below if isinstance(node, sympy.Pow) and node.exp.is_negative else below


@lru_cache(maxsize=256)
def _read_reference(reference: str) -> tuple[Any, ...]:
    return tuple(_read(f"${reference}$") or _read(f"\\boxed{{{reference}}}"))


def _read(text: str) -> list[Any]:
    """Return what math-verify reads: an expression and its text; empty if it cannot read it."""
    from math_verify import LatexExtractionConfig, parse

    found: list[Any] = parse(
        text,
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found
