"""A grader of one's own: def grade(prompt, reply) in a Python file, or a method of a task, called in killable processes."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never, cast

from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.user_code import describe, load_object
from lockstep.verifiers.base import unscored
from lockstep.verifiers.pool import Answered, Died, Exceeded, Failed, Work, WorkerPool
from lockstep.verifiers.wire import dumps, grade_fields, prompt_fields, read_grade, read_prompt

LARGEST = 1e300
"""Size of a reward: the sum of a step's must be a number."""

if TYPE_CHECKING:  # a worker has no use for the settings
    from lockstep.config import schema

UserGrade = Callable[[Prompt, str], object]


class UserFunction:
    """Calls the user's function, in a process of its own. What it returns or raises by mistake, a call that takes too long
    or too much memory, and one that starts processes or ends its own become an unscored reply, never a 0."""

    def __init__(
        self, path: str, limits: schema.OwnGrading, arguments: Mapping[str, schema.Json] | None = None
    ) -> None:
        """`path` is file.py:function; with `arguments` it is file.py:Class, and the function is `grade` of an object made with
        them. Raises TaskError if a process cannot load or make it, or if it cannot be called as (prompt, reply).
        """
        memory = None if limits.memory_gib is None else int(limits.memory_gib * 2**30)
        load = {"kind": "python", "path": path, "arguments": None if arguments is None else dict(arguments)}
        work = Work(load, path, wall_seconds=limits.seconds, memory=memory, own_code=True)
        self.pool = WorkerPool(work, limits.workers)
        self.workers = limits.workers
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


def load_in_worker(spec: str, arguments: Mapping[str, Any] | None) -> Callable[[Any], dict[str, Any]]:
    """What UserFunction calls, as a worker calls it. Raises TaskError if it cannot be used."""
    function = load_function(spec) if arguments is None else load_method(spec, arguments)

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


def load_method(spec: str, arguments: Mapping[str, Any]) -> UserGrade:
    """`grade` of an object of `file.py:Class`. Raises TaskError if it cannot be made, or not be called as (prompt, reply)."""
    function = getattr(make_object(load_class(spec), arguments, spec), "grade", None)
    if not callable(function):
        raise TaskError("it has no method grade", where=spec, fix="define grade(self, prompt, reply)")
    check_call(function, ("prompt", "reply"), f"{spec}.grade")
    return cast(UserGrade, function)


def load_class(spec: str) -> type:
    """The class `file.py:Class`. Raises TaskError if it is missing, or something else."""
    made = load_object(spec)
    if not inspect.isclass(made):
        raise TaskError(f"it is a {type(made).__name__}, not a class", where=spec, fix="name a class")
    return made


def make_object(made: type, arguments: Mapping[str, Any], spec: str) -> object:
    """An object of the class at `spec`. Raises TaskError if it cannot be made with these settings of a task."""
    try:
        return made(**arguments)
    except Exception as error:
        why = describe(error, Path(spec.rpartition(":")[0]).expanduser())
        raise TaskError(
            f"it cannot be made with {dict(arguments)}: {why}", where=spec, fix="correct task.settings"
        ) from error


def check_sendable(prompt: Prompt, where: str) -> None:
    """Raise TaskError for a prompt that holds what cannot be given to the processes that grade its replies."""
    try:
        dumps(prompt_fields(prompt))
    except TypeError as error:
        raise TaskError(
            f"its prompt {prompt.id} cannot be given to the processes that grade: {error}",
            where=where,
            fix="put text, numbers, lists, dictionaries, dates or bytes into its data, and make the rest of them in grade",
        ) from error


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


def as_grade(result: object) -> Grade:
    """A number or bool as a Grade (correct at 1 or more), a Grade as it is after a check; anything else is unscored.

    numpy's bool, which `a == b` of its numbers is, and Decimal are no numbers.Real to Python.
    """
    if isinstance(result, Decimal) or (type(result).__module__ == "numpy" and getattr(result, "ndim", 1) == 0):
        result = float(result)  # type: ignore[arg-type]
    match result:
        case Grade():
            return _checked(result)
        case numbers.Real() if _finite(result):
            reward = float(result)
            return Grade(reward, metrics={"correct": float(reward >= 1.0)})
        case numbers.Real():
            large = math.isfinite(result)
            return unscored(
                f"the grader returned {float(result)}, {f'beyond {LARGEST:g}' if large else 'not a finite number'}"
            )
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
    return isinstance(value, numbers.Real) and math.isfinite(value) and abs(float(value)) <= LARGEST
