"""Runs programs against tests, in a worker: the programs in sandboxes, the comparison of plain values here.

What the program is expected to answer never enters its sandbox.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import TaskError
from lockstep.verifiers.sandbox import plain
from lockstep.verifiers.sandbox.host import Flood, Run, Sandbox, SandboxError, TimeOut, ZygoteGone, pump
from lockstep.verifiers.sandbox.isolation import Limits
from lockstep.verifiers.sandbox.zygote import CALLS, SCRIPT, SYSTEM_CALLS, TESTS

WHERE = "verifier code"
ATTEMPTS = 8
"""To start a sandbox, when somebody kills it meanwhile."""
PROBE = """
import csv, os, socket, sys
def works(action):
    try:
        action()
    except (OSError, ImportError, ValueError):
        return False
    return True
def found():
    def env():
        if not os.environ: raise OSError
    tries = {
        "it can open a socket": lambda: socket.socket(),
        "it can start a process": lambda: os.fork(),
        "it sees /proc": lambda: os.listdir("/proc"),
        "it can write beside its folder": lambda: open("/sandbox-probe", "w"),
        "it can read /etc": lambda: os.listdir("/etc"),
        "it sees the environment": env,
        "it is root": lambda: os.setuid(0) if os.getuid() == 0 else int(""),
    }
    return [name for name, action in tries.items() if works(action)]
"""


class _Stop(Exception):
    """The program will not pass: it met a limit, ended, or did what is no answer."""

    def __init__(self, reason: str, limit: str = "") -> None:
        super().__init__(reason)
        self.limit = limit


def load(settings: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """What answers calls in a worker. Raises TaskError if strict isolation is asked for and not to be had."""
    limits = Limits(**settings["limits"])
    try:
        sandbox, found = _start(limits)
        missing = (*sandbox.missing, *found)
    except (SandboxError, TimeOut) as error:
        raise TaskError(
            f"the sandbox does not start: {error}", where=WHERE, fix="see docs/verifiers.md, Sandbox"
        ) from error
    if missing and settings["strict"]:
        raise TaskError(
            f"programs cannot be isolated here: {'; '.join(missing)}",
            where=f"{WHERE}, isolation",
            fix="run as root or where user namespaces are allowed (docs/verifiers.md, Sandbox), or set isolation: best_effort",
        )
    judge = Judge(
        sandbox, settings["wall_seconds"], settings["output_bytes"], settings["tolerance"], limits.cpu_seconds
    )
    isolation = {"in_force": list(sandbox.in_force), "missing": list(missing)}

    def answer(call: Any) -> dict[str, Any]:
        if call is None:
            return isolation
        try:
            return judge.run(call["code"], call["tests"])
        except ZygoteGone:  # whoever ended it would have ended this process too: the pool makes both anew
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    return answer


def _start(limits: Limits) -> tuple[Sandbox, list[str]]:
    """A sandbox, and what a program can do in it that it must not. Raises SandboxError, TimeOut."""
    for attempt in range(ATTEMPTS):
        try:
            sandbox = Sandbox(limits)
            return sandbox, _probe(sandbox)
        except ZygoteGone:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("not reached")


def _probe(sandbox: Sandbox) -> list[str]:
    """What a program in the sandbox can do that it must not: the measures are tried, not believed."""
    with sandbox.spawn(CALLS, (), time.monotonic() + 60) as run:
        run.start()
        try:
            loaded = run.ask({"code": PROBE})
            if "ok" not in loaded:
                raise SandboxError(f"a program cannot load Python's library as another user ({loaded.get('error')})")
            found = plain.value_of(run.ask({"op": "call", "name": "found", "args": [], "kwargs": _named({})}))
        except EOFError as error:
            ended = run.end()
            if ended is None or ended.status == -signal.SIGKILL:
                raise ZygoteGone("somebody killed its first program") from error
            raise SandboxError(f"a program in it ends with status {ended.status}") from error
        except plain.NotPlainError as error:
            raise SandboxError(f"a program in it gives no answer: {error}") from error
    return [str(name) for name in found]


class Judge:
    """Runs programs against tests, one at a time."""

    def __init__(
        self, sandbox: Sandbox, wall_seconds: float, output_bytes: int, tolerance: float, cpu_seconds: int
    ) -> None:
        self._sandbox, self._wall, self._output, self._tolerance = sandbox, wall_seconds, output_bytes, tolerance
        self._cpu = cpu_seconds

    def run(self, code: str, tests: Mapping[str, Any]) -> dict[str, Any]:
        """How many tests passed before the first that failed, of how many, and why that failed.

        Raises SandboxError if that cannot be said, through no fault of the program.
        """
        deadline = time.monotonic() + self._wall
        passed: list[bool] = []
        cases = tests["cases"]
        try:
            match tests["kind"]:
                case "scripts":
                    for case in cases:
                        self._script(code, case, deadline)
                        passed.append(True)
                case "calls":
                    self._calls(code, cases, deadline, passed)
                case _:
                    return self._pieces(code, cases, tests["names"], deadline)
        except _Stop as stop:
            return {"passed": len(passed), "total": len(cases), "first": str(stop), "limit": stop.limit}
        return {"passed": len(passed), "total": len(cases), "first": "", "limit": ""}

    def _script(self, code: str, case: Mapping[str, str], deadline: float) -> None:
        input_read, input_write = os.pipe()
        output_read, output_write = os.pipe()
        owned = {input_read, input_write, output_read, output_write}
        os.set_blocking(input_write, False)
        try:
            with self._sandbox.spawn(SCRIPT, (input_read, output_write), deadline) as run:
                for descriptor in (input_read, output_write):
                    owned.discard(descriptor)
                    os.close(descriptor)
                self._start(run)
                try:
                    run.tell({"code": code})
                    data = case["input"].encode("utf-8", "replace")
                    output = pump(input_write, data, output_read, deadline, self._output, owned)
                    run.wait()
                except (EOFError, Flood, TimeOut) as error:
                    raise self._why(run, error) from None
            if run.ended is None or run.ended.status != 0:
                raise self._why(run, EOFError())
        finally:
            for descriptor in owned:
                os.close(descriptor)
        if not same_output(output.decode("utf-8", "replace"), case["output"]):
            raise _Stop("it prints something else")

    def _calls(self, code: str, cases: list[Any], deadline: float, passed: list[bool]) -> None:
        with self._sandbox.spawn(CALLS, (), deadline) as run:
            self._load(run, code)
            for case in cases:
                request = {
                    "op": "call",
                    "name": case["function"],
                    "args": case["args"],
                    "kwargs": _named(case["kwargs"]),
                }
                answer = self._ask(run, request)
                if "ok" not in answer:
                    raise _Stop(f"{case['function']} raised {answer.get('error')}"[:300])
                try:
                    value = plain.value_of(answer)
                except plain.NotPlainError as error:
                    raise _Stop(f"{case['function']} gave no plain value: {error}") from None
                if not same_value(value, case["expected"], self._tolerance):
                    raise _Stop(f"{case['function']} gave something else")
                passed.append(True)

    def _pieces(self, code: str, cases: list[str], names: list[str], deadline: float) -> dict[str, Any]:
        """Tests as code: they run in a sandbox of their own, and call the program's over its pipes."""
        with self._sandbox.spawn(CALLS, (), deadline) as program:
            self._load(program, code)
            with self._sandbox.spawn(TESTS, program.hand_over(), deadline) as tests:
                self._start(tests)
                try:
                    said = tests.ask({"tests": cases, "names": names})
                except TimeOut as error:
                    raise self._why(program, error) from None
                except (EOFError, Flood, plain.NotPlainError) as error:
                    raise _Stop(f"the tests met a limit on what it gave them: {self._why(tests, error)}") from None
            limit = self._why(program, EOFError()).limit if said["lost"] else ""
        return {"passed": said["passed"], "total": len(cases), "first": said["first"], "limit": limit}

    def _start(self, run: Run) -> None:
        try:
            run.start()
        except TimeOut:
            raise SandboxError("a sandbox was not ready in time: the machine is too busy") from None

    def _load(self, run: Run, code: str) -> None:
        self._start(run)
        answer = self._ask(run, {"code": code})
        if "ok" not in answer:
            raise _Stop(f"it cannot be loaded: {answer.get('error')}"[:300])

    def _ask(self, run: Run, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return run.ask(message)
        except (EOFError, Flood, TimeOut) as error:
            raise self._why(run, error) from None
        except plain.NotPlainError as error:
            raise _Stop(str(error)) from None

    def _why(self, run: Run, error: Exception) -> _Stop:
        """What kept the program from answering. Raises SandboxError if it had no processor."""
        match error:
            case TimeOut():
                if run.starved(self._wall):
                    raise SandboxError(
                        f"the machine was too busy: the program had no processor for most of {self._wall:g} s"
                    )
                return _Stop(f"it took more than {self._wall:g} s", "time")
            case Flood():
                return _Stop(f"it printed more than {self._output} bytes", "output")
        ended = run.by_itself()
        if ended is None:
            return _Stop("it closed its end of the pipe")
        if ended.cpu_seconds > self._cpu - 0.2:
            return _Stop(f"it took more than {self._cpu} s of processor time", "cpu")
        if ended.status == -signal.SIGKILL and SYSTEM_CALLS in self._sandbox.in_force:
            raise ZygoteGone("somebody killed the program, which cannot do so itself")
        return _Stop(f"it ended with status {ended.status}")


def _named(arguments: Mapping[str, Any]) -> Any:
    return plain.encode(dict(arguments))


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line, but for white space at the ends of lines and empty lines at the end."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return ours == theirs


def same_value(value: object, expected: object, tolerance: float) -> bool:
    """Equal as JSON: tuples are lists, true is no number, numbers that are not both whole may differ by the tolerance."""
    if isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(same_value(a, b, tolerance) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(same_value(value[key], item, tolerance) for key, item in expected.items())
    if isinstance(expected, bool) or isinstance(value, bool) or not isinstance(expected, int | float):
        return type(value) is type(expected) and value == expected
    if not isinstance(value, int | float):
        return False
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    try:
        return value == expected or abs(value - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # a whole number that no float holds
        return False
