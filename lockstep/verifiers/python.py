"""Runs user-defined graders, def grade(prompt, reply) in a Python file or a task's method, in processes that it can kill."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never, cast

from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt, ReplyText
from lockstep.user_code import describe, load_callable, load_object, signature_of
from lockstep.verifiers.base import Asked, Reads, unscored
from lockstep.workers.pool import Answered, Died, Exceeded, Failed, Outcome, Work, WorkerPool
from lockstep.workers.wire import dumps

LARGEST = 1e300
"""Largest size of a reward, so that the sum over a step stays finite."""
LONGEST_FACT = 2000
"""Characters of a text among a grader's metrics that are stored."""

if TYPE_CHECKING:  # a worker has no use for the settings
    from lockstep.config import schema

UserGrade = Callable[[Prompt, str], object]


class UserGrader:
    """User code that grades, in processes of its own. What it returns or raises by mistake, a call that takes too long or too
    much memory, and one that starts processes or ends its own leave the replies of that call unscored, never at 0."""

    def __init__(self, module: str, arguments: Mapping[str, Any], path: str, limits: schema.OwnGrading) -> None:
        """Start one process, which loads the module (see process.Work). `path` is the user's file.py:name.

        Raises TaskError if it cannot be loaded.
        """
        memory, file = None if limits.memory_gib is None else int(limits.memory_gib * 2**30), path.rpartition(":")[0]
        work = Work(module, arguments, path, limits.seconds, memory=memory, own_code=True, file=file)
        self.pool = WorkerPool(work, limits.workers)
        self.workers = limits.workers
        self.pool.start()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return self.ask(prompt, [reply])[0]

    def ask(self, prompt: Prompt, replies: Sequence[str | ReplyText]) -> list[Grade]:
        """Return a grade for each reply, all from one call."""
        (grades,) = self.grade_many([(prompt, replies)])
        return grades

    def grade_many(self, asked: Sequence[Asked], late: Callable[[], None] = lambda: None) -> Iterator[list[Grade]]:
        """Yield the grades of the first of several calls, in order; see WorkerPool.call_many."""
        calls = [{"prompt": prompt, "replies": list(replies)} for prompt, replies in asked]
        with closing(self.pool.call_many(calls, late)) as outcomes:
            for (_, replies), outcome in zip(asked, outcomes, strict=False):
                yield _grades(outcome, len(replies))


def _grades(outcome: Outcome, count: int) -> list[Grade]:
    match outcome:
        case Answered(value):
            return list(value)
        case Failed(error):
            failed = unscored(error)
        case Exceeded(limit, error):
            failed = unscored(f"the grader met its {limit} limit: {error}")
        case Died(error):
            failed = unscored(f"the grader did not live: {error}")
        case _:
            assert_never(outcome)
    return [failed] * count


class UserFunction(UserGrader):
    """Calls a function of the user's for one reply at a time."""

    def __init__(
        self,
        path: str,
        limits: schema.OwnGrading,
        arguments: Mapping[str, schema.Json] | None = None,
        seed: int | None = None,
    ) -> None:
        """`path` is file.py:function; with `arguments` it is file.py:Class, and the function is `grade` of an object made with
        them, and with the seed if the class takes one. Raises TaskError if a process cannot load or make it, or if it cannot be
        called as (prompt, reply).
        """
        given = None if arguments is None else dict(arguments)
        super().__init__(__name__, {"path": path, "arguments": given, "seed": seed}, path, limits)


class RewardFunctions(UserGrader):
    """Functions written for another system, which read whole replies."""

    reads: Reads = "reply"

    def grade_many(self, asked: Sequence[Asked], late: Callable[[], None] = lambda: None) -> Iterator[list[Grade]]:
        whole = [
            (prompt, [ReplyText.probe(one) if isinstance(one, str) else one for one in all]) for prompt, all in asked
        ]
        return super().grade_many(whole, late)

    def grade_replies(self, prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        return self.ask(prompt, replies)


def load(path: str, arguments: Mapping[str, Any] | None, seed: int | None) -> Callable[[Any], list[Grade]]:
    """Load what UserFunction calls, in a worker. Raises TaskError if it cannot be used."""
    if arguments is None:
        function = cast(UserGrade, load_callable(path))
        check_call(function, ("prompt", "reply"), path)
    else:
        function = load_method(path, arguments, seed)
    return lambda call: [as_grade(function(call["prompt"], reply)) for reply in call["replies"]]


def load_method(spec: str, arguments: Mapping[str, Any], seed: int | None) -> UserGrade:
    """`grade` of an object of `file.py:Class`. Raises TaskError if it cannot be made, or not be called as (prompt, reply)."""
    made = load_class(spec)
    given = arguments if seed is None else with_seed(made, arguments, seed)
    function = getattr(make_object(made, given, spec), "grade", None)
    if not callable(function):
        raise TaskError(
            "the class has no method grade", where=spec, fix="define grade(self, prompt, reply) in the class"
        )
    check_call(function, ("prompt", "reply"), f"{spec}.grade")
    return cast(UserGrade, function)


def load_class(spec: str) -> type:
    """Return the class `file.py:Class`. Raises TaskError if it is missing, or something else."""
    made = load_object(spec)
    if not inspect.isclass(made):
        raise TaskError(
            f"the path names an object of type {type(made).__name__}, not a class",
            where=spec,
            fix="give a class, written file.py:Class",
        )
    return made


def with_seed(made: type, arguments: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return arguments of a class, and the seed if it takes one that they do not give."""
    own = {"seed": seed} if "seed" in inspect.signature(made).parameters else {}
    return {**own, **arguments}


def make_object(
    made: Callable[..., object], arguments: Mapping[str, Any], spec: str, fix: str = "correct task.settings"
) -> object:
    """Return an object of the class at `spec`. Raises TaskError if it cannot be made with these settings of a task."""
    try:
        return made(**arguments)
    except (Exception, SystemExit) as error:
        why = describe(error, Path(spec.rpartition(":")[0]).expanduser())
        raise TaskError(f"the call with the settings {dict(arguments)} failed: {why}", where=spec, fix=fix) from error


def check_sendable(prompt: Prompt, where: str) -> None:
    """Raise TaskError for a prompt that holds what cannot be given to the processes that grade its replies."""
    try:
        dumps(prompt)
    except TypeError as error:
        raise TaskError(
            f"the prompt {prompt.id} cannot be sent to the processes that grade: {error}",
            where=where,
            fix="put only text, numbers, lists, dictionaries, dates or bytes into Prompt.data; build all other objects in grade",
        ) from error


def check_call(function: Callable[..., object], arguments: tuple[str, ...], where: str) -> None:
    """Raise TaskError unless the function takes exactly these positional arguments and is not async."""
    if inspect.iscoroutinefunction(function):
        raise TaskError(
            "the function is async, but it is called without await",
            where=where,
            fix="define it with def, not async def",
        )
    signature = signature_of(function, where)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TaskError(
            f"the function takes {signature}, but is called with {len(arguments)} positional arguments: {error}",
            where=where,
            fix=f"define it with the parameters ({', '.join(arguments)})",
        ) from error


def as_grade(result: object) -> Grade:
    """Return the grade for what a user's function returned: a number, a bool, or a Grade, which is checked; else it is unscored.

    numpy's bool, which `a == b` of its numbers is, and Decimal are no numbers.Real to Python.
    """
    result = _plain(result)
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


def as_number(value: object) -> float | None:
    """Return a finite number as a float; None for anything else."""
    value = _plain(value)
    return float(value) if isinstance(value, numbers.Real) and _finite(value) else None


def _plain(value: object) -> object:
    """Return Decimal and single numbers of numpy and torch as floats; anything else as it is."""
    if isinstance(value, Decimal) or (type(value).__module__ in ("numpy", "torch") and getattr(value, "ndim", 1) == 0):
        return float(value)  # type: ignore[arg-type]
    return value


def _checked(grade: Grade) -> Grade:
    extracted, method, error = (
        value if isinstance(value, str | None) else _fact(value)
        for value in (grade.extracted, grade.method, grade.error)
    )
    grade = replace(grade, extracted=extracted, method=method or "", error=error)
    if grade.reward is None:
        return grade if grade.error else replace(grade, error="the grader gave no reward and no error")
    if not _finite(grade.reward):
        return unscored(f"the grader's Grade has the reward {grade.reward!r}, not a finite number")
    named = {str(name): value for name, value in dict(grade.metrics).items()}
    values = {name: value for name, value in named.items() if isinstance(value, int | float | numbers.Real)}
    if wrong := [name for name, value in values.items() if not _finite(value)]:
        return unscored(f"the grader's metric {wrong[0]!r} is {values[wrong[0]]!r}, not a finite number")
    metrics = {"correct": float(grade.reward >= 1.0)} | {name: float(value) for name, value in values.items()}
    facts = {name: _fact(value) for name, value in {**named, **dict(grade.facts)}.items() if name not in values}
    return replace(grade, reward=float(grade.reward), metrics=metrics, facts=facts)


def _fact(value: object) -> str:
    """Return a value that is no number as a text of bounded length, for the stored rollouts."""
    return (value if isinstance(value, str) else repr(value))[:LONGEST_FACT]


def _finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value) and abs(float(value)) <= LARGEST
