"""The verifier `code`: the reply's program runs against tests, in a sandbox."""

from __future__ import annotations

import ast
import builtins
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.verifiers import code_worker
from lockstep.verifiers.base import shown, unscored
from lockstep.verifiers.code_worker import PATIENCE
from lockstep.verifiers.extract import FINAL_SHARE, Answer, final_span
from lockstep.verifiers.sandbox import plain
from lockstep.verifiers.sandbox.isolation import Limits
from lockstep.workers.pool import Answered, Work, WorkerPool

if TYPE_CHECKING:
    from lockstep.config import schema

REGION = 65_536
"""A program is only looked for in this many characters at the end of the reply."""
SLACK_SECONDS = 90.0
"""Time that a worker may take beyond the tests of its reply: to prepare sandboxes, and to clean up."""
MAX_CASE = 1 << 22
"""Characters of one call with its expected result, as JSON."""
WHERE = "verifier code"
_FENCE = "```"
_PYTHON = ("python", "py", "python3", "")


@dataclass(frozen=True, slots=True)
class Tests:
    """Tests of a program, which are of one of three kinds:

    - scripts: runs of the whole program, what it reads and what it must print;
    - calls: calls of its functions, and what they must return: values as sandbox.plain.encode gives them;
    - pieces: code with assert statements.
    """

    kind: Literal["scripts", "calls", "pieces"]
    cases: tuple[Any, ...]
    names: tuple[str, ...] = ()
    """Names in pieces that the program defines."""


class Code:
    """Score 1 if the last python block of the reply passes all tests. Settings: config.schema.CodeVerifier."""

    def __init__(self, settings: schema.CodeVerifier) -> None:
        """Raises TaskError if isolation is strict and something that it needs is not to be had here."""
        self.column, self.workers = settings.tests, settings.workers
        limits = Limits(settings.cpu_seconds, settings.memory_mib << 20, settings.file_mib << 20, settings.threads)
        wanted = {
            "limits": asdict(limits),
            "strict": settings.isolation == "strict",
            "wall_seconds": settings.wall_seconds,
            "output_bytes": settings.output_kib << 10,
            "tolerance": settings.tolerance,
        }
        seconds = sum(PATIENCE) * settings.wall_seconds + SLACK_SECONDS
        work = Work(code_worker.__name__, {"settings": wanted}, WHERE, seconds, own_code=True)
        self.pool = WorkerPool(work, settings.workers)
        outcome = self.pool.call(None)
        if not isinstance(outcome, Answered):
            raise TaskError(
                f"the worker that runs programs did not start: {outcome.error}",
                where=WHERE,
                fix="read the worker's output above, and remove the cause of its error",
            )
        self.missing = tuple(outcome.value["missing"])
        """Measures that the isolation lacks, with the reasons."""
        lines = f"programs run in a sandbox: {', '.join(outcome.value['in_force'])}"
        lacks = f"; warning: not isolated in full: {'; '.join(self.missing)}" if self.missing else ""
        self.notes = (lines + lacks,)

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        try:
            tests = read_tests(prompt.data.get(self.column), prompt.data.get("entry_point"))
        except ValueError as error:
            return unscored(f"the tests of {shown(prompt.id)} (column {self.column}): {error}")
        answer = find_code(reply)
        if answer.text is None:
            return _grade(answer, 0, 1, "")
        call = {"code": answer.text.encode("utf-8", "replace").decode(), "tests": asdict(tests)}
        outcome = self.pool.call(call)
        if not isinstance(outcome, Answered):
            return unscored(f"the sandbox failed: {outcome.error}")
        result = outcome.value
        return _grade(answer, result["passed"], result["total"], result["limit"])


def _grade(answer: Answer, passed: int, total: int, limit: str) -> Grade:
    correct = float(passed == total)
    metrics = {
        "correct": correct,
        "has_answer": float(bool(answer.text)),
        "tests_passed": passed / total,
        "hit_limit": float(bool(limit)),
    }
    return Grade(correct, metrics, None if answer.text is None else shown(answer.text), answer.method)


def find_code(reply: str) -> Answer:
    """Return the last closed ```python (py, python3, or unnamed) block of the reply's final part. Linear."""
    start, end = final_span(reply)
    start = max(start, end - REGION)
    found: Answer = Answer(None, "none")
    opened, position, language = -1, start, ""
    for line in reply[start:end].splitlines(keepends=True):
        stripped = line.strip()
        if stripped.startswith(_FENCE):
            if opened < 0:
                language, opened = stripped[len(_FENCE) :].strip().lower(), position + len(line)
            elif stripped == _FENCE:
                if language in _PYTHON:
                    in_final = opened >= (1 - FINAL_SHARE) * len(reply)
                    found = Answer(reply[opened:position], "code_block", in_final)
                opened = -1
        position += len(line)
    return found


def read_tests(value: object, entry_point: object = None) -> Tests:
    """Read a row's tests, in any of the forms of docs/verifiers.md. Raises ValueError, saying what is wrong, for anything else.

    Example: read_tests(["assert add(1, 2) == 3"]) is Tests("pieces", ("assert add(1, 2) == 3",), ("add",))
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value, parse_int=_whole)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"they look like JSON and are not: {error}") from error
    given: Any = value
    match given:
        case str():
            return _pieces([given], entry_point)
        case {"inputs": list() as inputs, "outputs": list() as outputs} if 0 < len(inputs) == len(outputs):
            function = given.get("fn_name")
            if function:
                return _calls(
                    [{"function": function, "args": i, "expected": o} for i, o in zip(inputs, outputs, strict=True)]
                )
            return _scripts([{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)])
        case list() | tuple() if given and all(isinstance(item, str) for item in given):
            return _pieces(list(given), entry_point)
        case list() | tuple() if given and all(isinstance(item, Mapping) for item in given):
            return _scripts(given) if "output" in given[0] else _calls(given)
    raise ValueError("there are none, or they are in no form that is known")


def _scripts(cases: Sequence[Mapping[str, Any]]) -> Tests:
    for case in cases:
        if not (isinstance(case.get("input"), str) and isinstance(case.get("output"), str)):
            raise ValueError(f"a test needs input and output as text, not {_start_of(case)}")
    return Tests("scripts", tuple({"input": case["input"], "output": case["output"]} for case in cases))


def _whole(digits: str) -> int:
    """Read a whole number of any length: int() refuses more than 4300 digits."""
    return int(digits) if len(digits) < 4000 else int(Decimal(digits))


def _calls(cases: Sequence[Mapping[str, Any]]) -> Tests:
    made = []
    for case in cases:
        function, args, kwargs = case.get("function"), case.get("args") or [], case.get("kwargs") or {}
        whole = isinstance(function, str) and isinstance(args, list) and isinstance(kwargs, Mapping)
        if not whole or "expected" not in case:
            raise ValueError(f"a test needs function, args as a list, and expected, not {_start_of(case)}")
        try:
            values = {"args": args, "kwargs": dict(kwargs), "expected": case["expected"]}
            made.append({"function": function, **{name: plain.encode(value) for name, value in values.items()}})
            size = len(json.dumps(made[-1]))
        except (plain.NotPlainError, RecursionError) as error:
            raise ValueError(
                f"the test {_start_of(case)} has a value that cannot be sent to the sandbox: {error}"
            ) from error
        if size > MAX_CASE:
            raise ValueError(f"the test {_start_of(case)} has {size} characters; the most are {MAX_CASE}")
    return Tests("calls", tuple(made))


def _start_of(case: Mapping[str, Any]) -> str:
    return reprlib.repr(dict(case))


def _pieces(pieces: list[str], entry_point: object) -> Tests:
    try:
        trees = [ast.parse(piece) for piece in pieces]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last: nested too deep for the parser
        raise ValueError(f"they are not Python: {error}") from error
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in nodes):
        raise ValueError("they assert nothing, so any program would pass")
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name
    }
    bound |= {
        a.asname or a.name.partition(".")[0]
        for n in nodes
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }
    read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    if isinstance(entry_point, str) and "check" in bound and "check" not in read:  # the form of HumanEval
        pieces, read = [*pieces, f"check({entry_point})"], [*read, entry_point]
    names = tuple(dict.fromkeys(name for name in read if name not in bound and not hasattr(builtins, name)))
    if not names:
        raise ValueError("they use nothing that the program defines, so any program would pass")
    return Tests("pieces", tuple(pieces), names)
