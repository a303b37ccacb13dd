"""Runs reasoning-gym's own score functions in a sandbox, each reply in a process of its own.

Some of them call `eval` or sympy's parser, which evaluates Python, on the answer. Here both are replaced by readers that build
values from a syntax tree, and a process that scores can run no code made from a text at all.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from lockstep.verifiers import no_eval
from lockstep.verifiers.sandbox.plain import send
from lockstep.workers import wire

Serve = Callable[[io.BufferedReader, io.BufferedWriter], NoReturn]


def load() -> Callable[[str], Serve]:
    """Import reasoning-gym. The result makes a data set, of its name and settings as JSON, and gives what scores a reply."""
    import reasoning_gym
    import sympy

    # No reply is charged for what sympy loads at first use.
    sympy.simplify(no_eval.parse_expr("sin(x)**2 + cos(x)**2"))

    def prepare(role: str) -> Serve:
        name, settings = json.loads(role)
        return partial(_serve, reasoning_gym.create_dataset(name, seed=1, size=1, **json.loads(settings)))

    return prepare


def _serve(dataset: Any, requests: io.BufferedReader, answers: io.BufferedWriter) -> NoReturn:
    call = wire.loads(json.loads(requests.readline())["call"].encode())  # of any length: the item lists all solutions
    tried = no_eval.forbid_code()
    no_eval.replace_parser()
    module: Any = sys.modules[type(dataset).__module__]
    module.eval = no_eval.read_value
    if getattr(getattr(module, "parse_expr", None), "__module__", "").startswith("sympy."):
        module.parse_expr = no_eval.parse_expr
    answer: dict[str, Any]
    try:
        answer = {"score": float(dataset.score_answer(answer=call["answer"], entry=call["item"]))}
    except (Exception, SystemExit) as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    if tried:
        answer = {"error": f"the answer would have been run as code ({tried[0]})"}
    send(answers, answer)
    os._exit(0)
