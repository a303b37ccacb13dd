"""Code of a sandboxed process: runs a program as a script, serves calls of its functions, or runs the tests that call them.

The program and the tests never share a process. The tests get only plain values from the program, so a program can neither see
what is expected, nor replace the comparison, nor say that it passed.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from lockstep.verifiers.sandbox import plain
from lockstep.verifiers.sandbox.plain import NotPlainError, receive, send

FAILED = 1
_NOT_RAISED = (
    AssertionError,  # the tests would take this and the next three for their own
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    BaseExceptionGroup,  # these cannot be made from a text
    UnicodeDecodeError,
    UnicodeEncodeError,
    UnicodeTranslateError,
)
_RAISED = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, _NOT_RAISED)
}
"""Exceptions that the tests see as such. Any other is shown as its nearest base here."""
_MESSAGE = 300


def _said(error: BaseException) -> str:
    """Return type and message; the message may be made by code of the program."""
    try:
        return f"{type(error).__name__}: {error}"[:_MESSAGE].encode("ascii", "backslashreplace").decode()
    except BaseException:  # a program's exception can refuse to be printed, and so could what that raises
        return "an exception that cannot be printed"


def _raised(error: BaseException) -> dict[str, Any]:
    """Return the answer for an exception of the program."""
    answer = {"raised": next(k.__name__ for k in type(error).__mro__ if k in _RAISED.values()), "error": _said(error)}
    try:
        return answer | {"args": plain.encode(list(error.args))}
    except BaseException:
        return answer | {"args": [answer["error"]]}


def _names_of_module(name: str) -> dict[str, Any]:
    """Return the names of a new module, which dataclasses and pickle look up; with `exit` and `quit`, which `site` would add."""
    module = sys.modules[name] = ModuleType(name)
    names = vars(module)
    names["__builtins__"] = builtins
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    return names


def run_script(requests: io.BufferedReader, _: io.BufferedWriter) -> NoReturn:
    """Run the program on descriptors 0 and 1; the exit status says whether it ended well."""
    source = receive(requests)["code"]
    sys.stdin = io.TextIOWrapper(open(0, "rb"), encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb"), encoding="utf-8", errors="replace")  # noqa: SIM115
    vars(sys)["__stdout__"] = sys.stdout
    sys.argv = ["solution.py"]
    status = 0
    try:
        exec(compile(source, "solution.py", "exec"), _names_of_module("__main__"))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else FAILED * (error.code is not None)
    except BaseException:
        status = FAILED
    try:  # as Python ends: its threads, what it registered, its output
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if not sys.stdout.closed:
            sys.stdout.flush()
    except BaseException:
        status = FAILED
    os._exit(status & 255)


def serve_calls(requests: io.BufferedReader, answers: io.BufferedWriter) -> NoReturn:
    """Load the program, then answer requests: `get` a name or an attribute, `call` it, or list the `items` of an object."""
    kept: list[object] = []

    def refer(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    space = _names_of_module("solution")
    answer: dict[str, Any]
    found: Any
    try:
        exec(compile(receive(requests)["code"], "solution.py", "exec"), space)
        answer = {"ok": None}
    except BaseException as error:
        answer = _raised(error)
    send(answers, answer)
    while True:
        try:
            request = receive(requests)
        except EOFError:
            os._exit(0)
        try:
            if "ref" not in request:
                found = space[request["name"]]
            else:
                found = kept[request["ref"]]
                found = getattr(found, request["name"]) if "name" in request else found
            if request["op"] == "call":
                args, kwargs = (plain.decode(request[key], kept.__getitem__) for key in ("args", "kwargs"))
                found = found(*args, **kwargs)
            elif request["op"] == "items":
                found = list(found)
            answer = {"ok": plain.encode(found, refer)}
        except BaseException as error:
            answer = _raised(error)
        try:
            send(answers, answer)
        except NotPlainError as error:
            send(answers, {"raised": "TypeError", "error": str(error), "args": [str(error)]})


class ProgramEnded(BaseException):
    """The program ended, or broke off its pipes. No `except Exception` of the tests catches it."""


class Remote:
    """An object of the program, as the tests have it: they can call it and read its attributes, and it equals only itself.

    Its items are read once, as a list, and again only after one of its attributes was read or it was given to the program. So
    `len`, `in`, `[]` and a loop always see the same list.
    """

    def __init__(self, wire: _Wire, number: int) -> None:
        self.__dict__.update(_wire=wire, _number=number, _items=None)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._wire.ask({"op": "call", "ref": self._number}, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__["_items"] = None
        return self._wire.ask({"op": "get", "ref": self._number, "name": name})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("tests cannot set attributes of the program's objects")

    def __bool__(self) -> NoReturn:
        raise TypeError("the program gave an object where a plain value is tested")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(self._number == other._number)
        raise TypeError("the program gave an object where a plain value is compared")

    __hash__ = None  # type: ignore[assignment]

    def _list(self) -> list[Any]:
        if self._items is None:
            self.__dict__["_items"] = self._wire.ask({"op": "items", "ref": self._number})
        if not isinstance(self._items, list):
            raise TypeError("the program gave no list of an object's items")
        return self._items

    def __len__(self) -> int:
        return len(self._list())

    def __getitem__(self, key: Any) -> Any:
        return self._list()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._list()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list())


class _Wire:
    """The tests' connection to the program."""

    def __init__(self, requests: io.BufferedWriter, answers: io.BufferedReader) -> None:
        self._requests, self._answers = requests, answers
        self.lost = False
        """The program has ended, or closed its pipe."""

    def ask(
        self, request: dict[str, Any], arguments: tuple[object, ...] = (), named: dict[str, object] | None = None
    ) -> Any:
        """Return the program's answer, or raise what the program raised. Raises ProgramEnded if there is no answer."""
        args, kwargs = plain.encode(list(arguments), _own), plain.encode(named or {}, _own)
        if self.lost:
            raise ProgramEnded
        try:
            send(self._requests, {**request, "args": args, "kwargs": kwargs})
            answer = receive(self._answers)
        except (OSError, EOFError):
            self.lost = True
            raise ProgramEnded("the program gave no answer") from None
        if "ok" in answer:
            return plain.value_of(answer, lambda number: Remote(self, number))
        kind, text = _RAISED.get(str(answer.get("raised")), Exception), str(answer.get("error"))[:_MESSAGE]
        try:
            error = kind(*plain.decode(answer.get("args")))
        except Exception:  # these arguments do not fit the exception's base
            error = kind(text)
        raise error


def _own(value: object) -> int:
    if isinstance(value, Remote):
        value.__dict__["_items"] = None
        return int(value._number)
    raise NotPlainError(f"tests can give plain values to the program, not a {type(value).__name__}")


def run_tests(
    requests: io.BufferedReader, answers: io.BufferedWriter, to: io.BufferedWriter, back: io.BufferedReader
) -> NoReturn:
    """Run each piece of test code in one space, and say how many passed before the first that raised, and why."""
    task = receive(requests)
    wire = _Wire(to, back)
    space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    passed, first = 0, ""
    try:
        for name in task["names"]:
            with suppress(Exception):  # a test that needs a name which the program lacks raises NameError
                space[name] = wire.ask({"op": "get", "name": name})
        for number, source in enumerate(task["tests"], 1):
            exec(compile(source, f"test {number}", "exec"), space)
            if wire.lost:
                raise ProgramEnded("the program ended, and a test went on")
            passed = number
    except BaseException as error:
        first = f"test {passed + 1}: {_said(error)}"
    send(answers, {"passed": passed, "first": first, "lost": wire.lost})
    os._exit(0)
