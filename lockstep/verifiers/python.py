"""A verifier of one's own: def grade(prompt, reply) in a Python file, called in processes that may be killed."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.user_code import describe, load_object
from lockstep.verifiers.base import unscored
from lockstep.verifiers.pool import Answered, Died, Exceeded, Failed, Work, WorkerPool
from lockstep.verifiers.wire import grade_fields, prompt_fields, read_grade, read_prompt

if TYPE_CHECKING:  # a worker has no use for the settings
    from lockstep.config import schema

UserGrade = Callable[[Prompt, str], object]


class UserFunction:
    """Calls the user's function, in a process of its own. What it returns or raises by mistake, a call that takes too long
    or too much memory, and one that starts processes or ends its own become an unscored reply, never a 0."""

    def __init__(self, settings: schema.PythonVerifier) -> None:
        """Raises TaskError if the function is missing or cannot be called as (prompt, reply)."""
        memory = None if settings.memory_gib is None else int(settings.memory_gib * 2**30)
        load = {"kind": "python", "path": settings.path}
        work = Work(load, settings.path, wall_seconds=settings.seconds, memory=memory, own_code=True)
        self.pool = WorkerPool(work, settings.workers)
        self.workers = settings.workers
        self.pool.start()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        match self.pool.call({"prompt": prompt_fields(prompt), "reply": reply}):
            case Answered(value):
                return read_grade(value)
            case Failed(error):
                return unscored(error)
            case Exceeded(limit, error):
                return unscored(f"the grader met its {limit} limit: {error}")
            case Died(error):
                return unscored(f"the grader did not live: {error}")
            case outcome:
                assert_never(outcome)


def load_in_worker(spec: str) -> Callable[[Any], dict[str, Any]]:
    """The function `file.py:function`, as a worker calls it. Raises TaskError if it cannot be used."""
    function = load_function(spec)

    def answer(call: Any) -> dict[str, Any]:
        grade = as_grade(function(read_prompt(call["prompt"]), call["reply"]))
        return grade_fields(grade)

    return answer


def load_function(spec: str) -> UserGrade:
    """The function `file.py:function`. Raises TaskError if it is missing or cannot be called as (prompt, reply)."""
    function = load_object(spec)
    if not callable(function):
        raise TaskError(f"it is a {type(function).__name__}, not a function", where=spec, fix="name a function")
    check_call(function, ("prompt", "reply"), spec)
    return function


def check_call(function: Callable[..., object], arguments: tuple[str, ...], where: str) -> None:
    """Raise TaskError unless the function takes exactly these positional arguments and is not async."""
    if inspect.iscoroutinefunction(function):
        raise TaskError("it is async; it is called and its result used at once", where=where, fix="use def")
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TaskError(
            f"it takes {signature}, but is called with {len(arguments)} positional arguments: {error}",
            where=where,
            fix=f"define it as ({', '.join(arguments)})",
        ) from error


def grade_safely(function: UserGrade, prompt: Prompt, reply: str, file: Path) -> Grade:
    """The function's grade; an exception or an unusable result gives a Grade without reward that says why."""
    try:
        return as_grade(function(prompt, reply))
    except (Exception, SystemExit) as error:
        return unscored(describe(error, file))


def as_grade(result: object) -> Grade:
    """A number or bool as a Grade (correct at 1 or more), a Grade as it is after a check; anything else is unscored."""
    match result:
        case Grade():
            return _checked(result)
        case numbers.Real() if math.isfinite(result):
            reward = float(result)
            return Grade(reward, metrics={"correct": float(reward >= 1.0)})
        case numbers.Real():
            return unscored(f"the grader returned {float(result)}, not a finite number")
        case _:
            return unscored(f"the grader returned {type(result).__name__}, not a number, bool or Grade")


def _checked(grade: Grade) -> Grade:
    if grade.reward is None:
        return grade if grade.error else replace(grade, error="the grader gave no reward and no error")
    if not _finite(grade.reward):
        return unscored(f"the grader's Grade has the reward {grade.reward!r}, not a finite number")
    wrong = [name for name, value in grade.metrics.items() if not (isinstance(name, str) and _finite(value))]
    if wrong:
        return unscored(f"the grader's metric {wrong[0]!r} is {grade.metrics[wrong[0]]!r}, not a finite number")
    metrics = {"correct": float(grade.reward >= 1.0)} | {name: float(value) for name, value in grade.metrics.items()}
    return replace(grade, reward=float(grade.reward), metrics=metrics)


def _finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
