"""The built-in tool `calculator`: exact if possible, with bounded time and size for any input."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_BITS = 2048
"""Most bits of the numerator and denominator of any intermediate number."""
MAX_DEPTH = 40

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "\u00a0": " "})


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression with + - * / // % ** and parentheses.

    Args:
        expression: what to evaluate, for example (12 + 30) * 4
    """
    text = expression.strip().rstrip("=").strip()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(text.translate(_SIGNS), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"this is no arithmetic expression: {text!r}") from error
    return _written(_value(tree.body, 0))


def _value(node: ast.expr, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, depth + 1), _value(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                return _bounded(_BINARY[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
            except ZeroDivisionError as error:
                raise ValueError("division by zero") from error
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are understood")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_BITS:
        raise ValueError("exponents are whole numbers, not too large")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > 2 * MAX_BITS:
        raise ValueError("the result is too large")
    if not base and exponent < 0:
        raise ValueError("division by zero")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the result is too large")
    return value


def _written(value: Fraction) -> str:
    """Write a whole number exactly, anything else with ten significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.10g}"
    except OverflowError as error:
        raise ValueError("the result is too large") from error
