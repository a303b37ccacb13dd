"""Runs reasoning-gym's own score functions in a sandbox, each reply in a process of its own.

Some of them call `eval` or sympy's parser, which evaluates Python, on the answer. Here both are replaced by readers that build
values from a syntax tree, and a process that scores can run no code made from a text at all.
"""

from __future__ import annotations

import ast
import io
import json
import operator
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from lockstep.verifiers import wire
from lockstep.verifiers.sandbox.plain import receive, send

FUNCTIONS = frozenset(
    (
        *("exp", "log", "ln", "sqrt", "Abs", "sign", "sin", "cos", "tan", "cot", "sec", "csc"),
        *("asin", "acos", "atan", "acot", "asec", "acsc", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh"),
        *("erf", "erfi", "Si", "Ci", "li", "Ei"),
    )
)
"""Functions of sympy that an answer may use."""
OF_REFERENCES = frozenset(("Integral",))
"""Functions that only a reference may use first: an answer that repeats the question's integral solves nothing."""
CONSTANTS = frozenset(("E", "I", "pi"))
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


Serve = Callable[[io.BufferedReader, io.BufferedWriter], NoReturn]


def load() -> Callable[[str], Serve]:
    """Import reasoning-gym. The result makes a data set, of its name and settings as JSON, and gives what scores a reply."""
    import reasoning_gym
    import sympy

    sympy.simplify(parse_expr("sin(x)**2 + cos(x)**2"))  # so that no reply is charged for what sympy loads at first use

    def prepare(role: str) -> Serve:
        name, settings = json.loads(role)
        return partial(_serve, reasoning_gym.create_dataset(name, seed=1, size=1, **json.loads(settings)))

    return prepare


def _serve(dataset: Any, requests: io.BufferedReader, answers: io.BufferedWriter) -> NoReturn:
    call = wire.loads(receive(requests)["call"].encode())
    tried = _forbid_code()
    _replace_evaluators(sys.modules[type(dataset).__module__])
    answer: dict[str, Any]
    try:
        answer = {"score": float(dataset.score_answer(answer=call["answer"], entry=call["item"]))}
    except (Exception, SystemExit) as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    if tried:
        answer = {"error": f"the answer would have been run as code ({tried[0]})"}
    send(answers, answer)
    os._exit(0)


def _forbid_code() -> list[str]:
    """Refuse, from now on, to run code that comes from no file; the list then says that this was tried.

    One function of sympy makes code from a number, the number of variables of a polynomial.
    """
    from sympy.polys.monomials import MonomialOps

    tried: list[str] = []
    allowed = MonomialOps._build.__code__

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        from_text = event == "exec" and arguments[0].co_filename.startswith("<")
        if from_text and sys._getframe(1).f_code is not allowed:
            tried.append(arguments[0].co_filename)
            raise RuntimeError("no code is run here")

    sys.addaudithook(hook)
    return tried


def _replace_evaluators(module: Any) -> None:
    """Give a data set's module, and sympy, readers in the place of what evaluates Python."""
    import sympy

    module.eval = ast.literal_eval
    sympy.parse_expr = parse_expr
    if hasattr(module, "parse_expr") and module.parse_expr.__module__.startswith("sympy."):
        module.parse_expr = parse_expr


def parse_expr(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """What sympy's parse_expr gives for an arithmetic expression. Raises ValueError, SyntaxError for anything else."""
    return _built(ast.parse(text.strip(), mode="eval").body, text.strip(), local_dict or {})


def _built(node: ast.AST, text: str, names: Mapping[str, Any]) -> Any:
    import sympy

    match node:
        case ast.Constant(value=bool() | complex()):
            raise ValueError("no number")
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
    raise ValueError(f"an expression does not hold a {type(node).__name__}")
