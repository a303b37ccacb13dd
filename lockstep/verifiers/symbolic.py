"""The second stage of the verifier `math`: are two LaTeX expressions equal? By math-verify, in a worker with limits.

https://github.com/huggingface/Math-Verify. Only its LaTeX reader is used: its reader for plain text evaluates Python.
Its own time limits are alarms, which work in no thread but the main one; they are off, the worker's limits hold instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeAlias

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


def load() -> Callable[[Any], object]:
    """What answers calls in a worker. Raises TaskError if math-verify is not installed."""
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
    return lambda call: compare(call["answer"], call["reference"])


def compare(answer: str, reference: str) -> Verdict:
    """Whether math-verify takes both for the same. May take for ever, and any memory."""
    from math_verify import verify

    right = _read_reference(reference)
    if not right:
        return "no reference"
    read = _read(f"\\boxed{{{answer}}}")
    if not read:
        return "no answer"
    same = verify(
        list(right), read, float_rounding=ROUNDING, numeric_precision=PRECISION, strict=True, timeout_seconds=None
    )
    return "equal" if same else "different"


@lru_cache(maxsize=256)
def _read_reference(reference: str) -> tuple[Any, ...]:
    return tuple(_read(f"${reference}$") or _read(f"\\boxed{{{reference}}}"))


def _read(text: str) -> list[Any]:
    """What math-verify reads: an expression and its text; empty if it cannot read it."""
    from math_verify import LatexExtractionConfig, parse

    found: list[Any] = parse(
        text,
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found
