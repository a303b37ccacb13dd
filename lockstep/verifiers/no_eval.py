"""Protection against `eval` of a reply's text: safe parsers in place of `eval` and of sympy's parser, and an audit hook.

sympy's `sympify`, which math-verify calls too, and some score functions of reasoning-gym pass text to `eval`.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

FUNCTIONS = frozenset(
    (
        *("exp", "log", "ln", "sqrt", "Abs", "sign", "sin", "cos", "tan", "cot", "sec", "csc"),
        *("asin", "acos", "atan", "acot", "asec", "acsc", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh"),
        *("erf", "erfi", "Si", "Ci", "li", "Ei"),
    )
)
"""Functions of sympy that an answer may use."""
OF_REFERENCES = frozenset(("Integral",))
"""Functions that an answer may use only if the reference uses them: repeating the integral of the question is no solution."""
CONSTANTS = frozenset(("E", "I", "pi"))
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def forbid_code() -> list[str]:
    """Forbid, from now on, code that comes from no file. Each attempt raises RuntimeError and is added to the returned list.

    One function of sympy is exempt: it builds code from the number of variables of a polynomial, not from text.
    """
    from sympy.polys.monomials import MonomialOps

    tried: list[str] = []
    allowed = MonomialOps._build.__code__

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        from_text = event == "exec" and arguments[0].co_filename.startswith("<")
        if from_text and sys._getframe(1).f_code is not allowed:
            tried.append(arguments[0].co_filename)
            raise RuntimeError("code from text must not run in this process")

    sys.addaudithook(hook)
    return tried


def replace_parser() -> None:
    """Replace sympy's parser, which evaluates text, by `parse_expr` below."""
    import sympy
    from sympy.parsing import sympy_parser

    sympy.parse_expr = sympy_parser.parse_expr = parse_expr


def read_value(text: str) -> Any:
    """Return the value of a Python literal or an arithmetic expression. Raises ValueError, SyntaxError for anything else."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return parse_expr(text)


def parse_expr(text: str, local_dict: Mapping[str, Any] | None = None, **_: object) -> Any:
    """Return what sympy's parse_expr gives for an arithmetic expression. Raises ValueError, SyntaxError for anything else."""
    return _built(ast.parse(text.strip(), mode="eval").body, text.strip(), local_dict or {})


def _built(node: ast.AST, text: str, names: Mapping[str, Any]) -> Any:
    import sympy

    match node:
        case ast.Constant(value=bool() | complex()):
            raise ValueError("not a number")
        case ast.Constant(value=int() as value):
            return sympy.Integer(value)
        case ast.Constant(value=float()):
            return sympy.Float(ast.get_source_segment(text, node))
        case ast.Name(id=name):
            return names.get(name, getattr(sympy, name) if name in CONSTANTS else sympy.Symbol(name))
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_built(node.left, text, names), _built(node.right, text, names))
        case ast.UnaryOp(op=op) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_built(node.operand, text, names))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS | OF_REFERENCES:
            return getattr(sympy, name)(*(_built(argument, text, names) for argument in node.args))
    raise ValueError(f"a {type(node).__name__} is not allowed in an expression")
