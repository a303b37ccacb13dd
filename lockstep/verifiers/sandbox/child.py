"""What runs in a sandbox: a program as a script, its functions one call at a time, or the tests that call them.

The program and the tests never share a process. Tests get plain values alone from the program, so it can neither see what is
expected of it, nor replace what compares it, nor say that it passed.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from typing import Any, NoReturn

from lockstep.verifiers.sandbox import plain
from lockstep.verifiers.sandbox.plain import NotPlainError, receive, send

FAILED = 1
_NOT_RAISED = (AssertionError, ExceptionGroup, UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
"""These would be taken for a test's own, or cannot be made from a text."""
_MESSAGE = 300


def _said(error: BaseException) -> str:
    """Type and message; the message may be code of the program's."""
    try:
        return f"{type(error).__name__}: {error}"[:_MESSAGE].encode("ascii", "backslashreplace").decode()
    except BaseException:  # a program's exception can refuse to be printed, and so could what that raises
        return "an exception that cannot be printed"


def run_script(requests: io.BufferedReader, _: io.BufferedWriter) -> NoReturn:
    """Run the program on descriptors 0 and 1; the exit status says whether it ended well."""
    source = receive(requests)["code"]
    sys.stdin = io.TextIOWrapper(open(0, "rb"), encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb"), encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.argv = ["solution.py"]
    status = 0
    try:
        exec(compile(source, "solution.py", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else FAILED * (error.code is not None)
    except BaseException:
        status = FAILED
    try:
        sys.stdout.flush()
    except BaseException:
        status = FAILED
    os._exit(status & 255)


def serve_calls(requests: io.BufferedReader, answers: io.BufferedWriter) -> NoReturn:
    """Load the program, then call what is asked for, each time with copies of the arguments."""
    kept: list[object] = []

    def refer(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    space: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
    answer: dict[str, Any]
    try:
        exec(compile(receive(requests)["code"], "solution.py", "exec"), space)
        answer = {"ok": None}
    except BaseException as error:
        answer = {"raised": type(error).__name__, "error": _said(error)}
    send(answers, answer)
    while True:
        try:
            request = receive(requests)
        except EOFError:
            os._exit(0)
        try:
            target: Any = kept[request["ref"]] if "ref" in request else space
            name = request.get("name")
            found = target if name is None else (space[name] if target is space else getattr(target, name))
            if request["op"] == "call":
                args, kwargs = (plain.decode(request[key], kept.__getitem__) for key in ("args", "kwargs"))
                found = found(*args, **kwargs)
            answer = {"ok": plain.encode(found, refer)}
        except BaseException as error:
            answer = {"raised": type(error).__name__, "error": _said(error)}
        try:
            send(answers, answer)
        except NotPlainError as error:
            send(answers, {"raised": "TypeError", "error": str(error)})


class ProgramError(Exception):
    """The program raised something that is not built in, or ended."""


class Remote:
    """Something of the program's, as the tests have it: it can be called, and its attributes read; it equals only itself."""

    def __init__(self, wire: _Wire, reference: dict[str, Any]) -> None:
        self.__dict__.update(_wire=wire, _reference=reference)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._wire.ask({"op": "call", **self._reference}, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = self._reference
        if "ref" not in target:
            target = self._wire.ask({"op": "get", **target}, (), {})._reference
        return self._wire.ask({"op": "get", **target, "name": name}, (), {})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("tests cannot set attributes of the program's objects")

    def __bool__(self) -> NoReturn:
        raise TypeError("the program gave an object where a plain value is tested")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(self._reference == other._reference)
        raise TypeError("the program gave an object where a plain value is compared")

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return int(self._wire.ask({"op": "call", "name": "__len__", **self._reference}, (), {}))

    def __getitem__(self, key: object) -> Any:
        return self._wire.ask({"op": "call", "name": "__getitem__", **self._reference}, (key,), {})

    def __contains__(self, key: object) -> bool:
        return self._wire.ask({"op": "call", "name": "__contains__", **self._reference}, (key,), {}) is True

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])


class _Wire:
    """The tests' way to the program."""

    def __init__(self, requests: io.BufferedWriter, answers: io.BufferedReader) -> None:
        self._requests, self._answers = requests, answers
        self.lost = False
        """The program has ended, or closed its pipe."""

    def ask(self, request: dict[str, Any], arguments: tuple[object, ...], named: dict[str, object]) -> Any:
        """What the program's function returns. Raises what it raises if that is a built-in Exception, else ProgramError."""
        args, kwargs = plain.encode(list(arguments), _own), plain.encode(named, _own)
        try:
            send(self._requests, {**request, "args": args, "kwargs": kwargs})
            answer = receive(self._answers)
            if "ok" in answer:
                return plain.value_of(answer, lambda number: Remote(self, {"ref": number}))
        except (OSError, EOFError, NotPlainError) as error:
            self.lost = self.lost or not isinstance(error, NotPlainError)
            raise ProgramError(f"the program gave no answer ({type(error).__name__}: {error})") from None
        text = str(answer.get("error"))[:_MESSAGE]
        kind = getattr(builtins, str(answer.get("raised")), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _NOT_RAISED:
            raise kind(text)
        raise ProgramError(text)


def _own(value: object) -> int:
    if isinstance(value, Remote) and "ref" in value._reference:
        return int(value._reference["ref"])
    raise NotPlainError(f"tests can give plain values to the program, not a {type(value).__name__}")


def run_tests(
    requests: io.BufferedReader, answers: io.BufferedWriter, to: io.BufferedWriter, back: io.BufferedReader
) -> NoReturn:
    """Run each piece of test code in one space, and say how many passed before the first that raised, and why."""
    task = receive(requests)
    wire = _Wire(to, back)
    space: dict[str, Any] = {name: Remote(wire, {"name": name}) for name in task["names"]}
    space |= {"__name__": "tests", "__builtins__": builtins}
    passed, first = 0, ""
    for number, source in enumerate(task["tests"], 1):
        try:
            exec(compile(source, f"test {number}", "exec"), space)
            passed += 1
        except Exception as error:
            first = f"test {number}: {_said(error)}"
            break
    send(answers, {"passed": passed, "first": first, "lost": wire.lost})
    os._exit(0)
