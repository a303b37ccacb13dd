"""Grades programs in a worker: runs them against tests in sandboxes, and compares their outputs in the worker itself.

The expected answers never enter a program's sandbox. However a program ends, its reward is 0 or 1; it is unscored only after
an error that the program cannot have caused.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import TaskError
from lockstep.verifiers.sandbox import plain
from lockstep.verifiers.sandbox.host import Ended, Flood, Run, Sandbox, SandboxError, TimeOut, ZygoteGone, pump
from lockstep.verifiers.sandbox.isolation import Limits
from lockstep.verifiers.sandbox.zygote import CALLS, SCRIPT, TESTS

WHERE = "verifier code"
ATTEMPTS = 8
"""Most times that a sandbox is started, or a program run, if it is killed from outside."""
PATIENCE = (1, 2, 4)
"""Deadlines of the attempts, as multiples of wall_seconds: the next one is made if the program had too little of a processor."""
USED_UP = 0.9
"""Share of wall_seconds that counts as all of it."""
ANSWER_BYTES = 1 << 20
"""A call's answer may be so much longer than sixteen times the expected one; what is longer cannot be right."""
PROBE = """
import csv, os, site, socket, sys
def works(action):
    try:
        action()
    except (OSError, ImportError, ValueError):
        return False
    return True
def found():
    def env():
        if not os.environ: raise OSError
    def packages():
        if not [os.listdir(path) for path in site.getsitepackages() if os.path.isdir(path) and os.listdir(path)]: raise OSError
    tries = {
        "it can open a socket": lambda: socket.socket(),
        "it can start a process": lambda: os.fork(),
        "it sees /proc": lambda: os.listdir("/proc"),
        "it can write beside its folder": lambda: open("/sandbox-probe", "w"),
        "it can read /etc": lambda: os.listdir("/etc"),
        "it sees the environment": env,
        "it sees installed packages": packages,
        "it is root": lambda: os.setuid(0) if os.getuid() == 0 else int(""),
    }
    return [name for name, action in tries.items() if works(action)]
"""


class _Stop(Exception):
    """The program failed: it met a limit, ended, or gave a wrong answer."""

    def __init__(self, reason: str, limit: str = "") -> None:
        super().__init__(reason)
        self.limit = limit


class _Killed(Exception):
    """Something killed the program, and it had not used its processor time up."""


class _Starved(Exception):
    """Time is up, and the program had no processor for too much of it."""


class _Clock:
    """The time of one attempt, and what the program could use of it."""

    def __init__(self, seconds: float) -> None:
        self._begun, self._used = time.monotonic(), _used()
        self.deadline = self._begun + seconds
        self.starting = 0.0
        """Seconds for which sandboxes were being prepared."""
        self.runs: list[Run] = []

    def seconds(self) -> float:
        """End all runs, and return the time in which the program had a processor, or wanted none.

        While one of the processes runs, waits of the others do not count: the program could make its own threads wait.
        """
        passed = time.monotonic() - self._begun - self.starting
        cpu, waited = (now - then for now, then in zip(_used(), self._used, strict=True))
        for run in self.runs:
            ended = _known(run.end())
            cpu, waited = cpu + ended.cpu_seconds, waited + ended.waited_seconds
        return passed - max(0.0, min(waited, passed - cpu))


def _used() -> tuple[float, float]:
    """Seconds for which this thread ran and waited for a processor; 0 where the kernel does not count."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def _known(ended: Ended | None) -> Ended:
    if ended is None:
        raise ZygoteGone("its process was lost")
    return ended


def _out_of_memory() -> int:
    """Count the processes that the kernel has killed because memory was short."""
    with suppress(OSError):  # some containers have no such file
        lines = [line.split() for line in Path("/proc/vmstat").read_text().splitlines()]
        return next((int(count) for name, count in lines if name == "oom_kill"), 0)
    return 0


def load(settings: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Return the function that answers calls in a worker. Raises TaskError if strict isolation is asked for and not to be had."""
    limits = Limits(**settings["limits"])
    try:
        sandbox, found = _start(limits)
        missing = (*sandbox.missing, *found)
    except (SandboxError, TimeOut) as error:
        raise TaskError(
            f"the sandbox did not start: {error}", where=WHERE, fix="follow docs/verifiers.md, section Sandbox"
        ) from error
    if missing and settings["strict"]:
        raise TaskError(
            f"this machine cannot isolate programs: {'; '.join(missing)}",
            where=f"{WHERE}, isolation",
            fix="run as root or where user namespaces are allowed (docs/verifiers.md, Sandbox), or set isolation=best_effort",
        )
    judge = Judge(sandbox, settings)
    isolation = {"in_force": list(sandbox.in_force), "missing": list(missing)}

    def answer(call: Any) -> dict[str, Any]:
        if call is None:
            return isolation
        try:
            return judge.run(call["code"], call["tests"])
        except ZygoteGone:  # the pool replaces this process and its sandbox together
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    return answer


def _start(limits: Limits) -> tuple[Sandbox, list[str]]:
    """Return a sandbox, and what a program can do in it that it must not. Raises SandboxError, TimeOut."""
    for attempt in range(ATTEMPTS):
        try:
            sandbox = Sandbox(limits)
            return sandbox, _probe(sandbox)
        except ZygoteGone:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("not reached")


def _probe(sandbox: Sandbox) -> list[str]:
    """List what a program in the sandbox can do that it must not: the measures are tried, not believed."""
    with sandbox.spawn(CALLS, (), time.monotonic() + 60) as run:
        run.start()
        try:
            loaded = run.ask({"code": PROBE})
            if "ok" not in loaded:
                raise SandboxError(f"a program cannot load Python's library as another user ({loaded.get('error')})")
            found = plain.value_of(run.ask({"op": "call", "name": "found", "args": [], "kwargs": plain.encode({})}))
        except EOFError as error:
            ended = run.end()
            if ended is None or ended.status == -signal.SIGKILL:
                raise ZygoteGone("its first program was killed") from error
            raise SandboxError(f"a program in it ends with status {ended.status}") from error
        except plain.NotPlainError as error:
            raise SandboxError(f"a program in it gives no answer: {error}") from error
    return [str(name) for name in found]


class Judge:
    """Runs programs against tests, one at a time."""

    def __init__(self, sandbox: Sandbox, settings: Mapping[str, Any]) -> None:
        self._sandbox, self._wall, self._output = sandbox, settings["wall_seconds"], settings["output_bytes"]
        self._tolerance, self._cpu = settings["tolerance"], settings["limits"]["cpu_seconds"]

    def run(self, code: str, tests: Mapping[str, Any]) -> dict[str, Any]:
        """Return how many tests passed before the first that failed, of how many, why it failed, and which limit was met.

        A program that was killed or starved is run again. Raises SandboxError if that does not help and is not its own fault.
        """
        patience, kills, shortages = list(PATIENCE), 0, _out_of_memory()
        self._spent, self._clock = 0.0, _Clock(self._wall * patience.pop(0))
        while True:
            passed: list[bool] = []
            stop = _Stop("")
            try:
                self._once(code, tests, passed)
            except _Stop as error:
                stop = error
            except _Killed:
                kills += 1
                if kills < ATTEMPTS:
                    continue
                if _out_of_memory() > shortages:
                    raise SandboxError("the machine has too little memory: the kernel kills programs") from None
                stop = _Stop(f"it was killed {kills} times")
            except _Starved:
                if not patience:
                    seconds = PATIENCE[-1] * self._wall
                    raise SandboxError(
                        f"the machine is too busy: a program waited for it for most of {seconds:g} s"
                    ) from None
                self._clock = _Clock(self._wall * patience.pop(0))
                continue
            return {"passed": len(passed), "total": len(tests["cases"]), "first": str(stop), "limit": stop.limit}

    def _once(self, code: str, tests: Mapping[str, Any], passed: list[bool]) -> None:
        """Run the tests and append to `passed` at each one. Raises _Stop at the first that fails, _Killed, _Starved."""
        match tests["kind"]:
            case "scripts":
                for case in tests["cases"]:
                    self._script(code, case)
                    passed.append(True)
            case "calls":
                self._calls(code, tests["cases"], passed)
            case _:
                self._pieces(code, tests, passed)

    def _script(self, code: str, case: Mapping[str, str]) -> None:
        input_read, input_write = os.pipe()
        output_read, output_write = os.pipe()
        owned = {input_read, input_write, output_read, output_write}
        os.set_blocking(input_write, False)
        try:
            with self._spawn(SCRIPT, (input_read, output_write)) as run:
                for descriptor in (input_read, output_write):
                    owned.discard(descriptor)
                    os.close(descriptor)
                self._start(run)
                data, expected = (case[name].encode("utf-8", "replace") for name in ("input", "output"))
                most = self._output + len(expected)
                try:
                    run.tell({"code": code})
                    output = pump(input_write, data, output_read, self._clock.deadline, most, owned)
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

    def _calls(self, code: str, cases: Sequence[Any], passed: list[bool]) -> None:
        with self._spawn(CALLS) as run:
            self._load(run, code)
            for case in cases:
                request = {"op": "call", "name": case["function"], "args": case["args"], "kwargs": case["kwargs"]}
                expected = {"ok": case["expected"]}
                answer = self._ask(run, request, ANSWER_BYTES + 16 * len(json.dumps(expected)))
                if "ok" not in answer:
                    raise _Stop(f"{case['function']} raised {answer.get('error')}"[:300])
                try:
                    value = plain.value_of(answer)
                except plain.NotPlainError as error:
                    raise _Stop(f"{case['function']} gave no plain value: {error}") from None
                if not same_value(value, plain.value_of(expected), self._tolerance):
                    raise _Stop(f"{case['function']} gave something else")
                passed.append(True)

    def _pieces(self, code: str, tests: Mapping[str, Any], passed: list[bool]) -> None:
        """Run tests that are code in a sandbox of their own, from where they call the program over its pipes."""
        with self._spawn(CALLS) as program:
            self._load(program, code)
            with self._spawn(TESTS, program.hand_over()) as runner:
                self._start(runner)
                said = self._ask(runner, {"tests": tests["cases"], "names": tests["names"]})
            passed += [True] * said["passed"]
            if said["lost"]:
                raise self._why(program, EOFError())
            if said["first"]:
                raise _Stop(said["first"])

    def _spawn(self, role: str, theirs: Sequence[int] = ()) -> Run:
        run = self._sandbox.spawn(role, theirs, self._clock.deadline)
        self._clock.runs.append(run)
        return run

    def _start(self, run: Run) -> None:
        begun = time.monotonic()
        try:
            run.start()
            self._clock.starting += time.monotonic() - begun
        except TimeOut as error:
            self._clock.starting += time.monotonic() - begun
            raise self._why(run, error) from None

    def _load(self, run: Run, code: str) -> None:
        self._start(run)
        answer = self._ask(run, {"code": code})
        if "ok" not in answer:
            raise _Stop(f"it cannot be loaded: {answer.get('error')}"[:300])

    def _ask(self, run: Run, message: Mapping[str, Any], most: int = plain.MAX_LINE) -> dict[str, Any]:
        try:
            return run.ask(message, most)
        except (EOFError, Flood, TimeOut) as error:
            raise self._why(run, error) from None
        except plain.NotPlainError as error:
            raise _Stop(str(error)) from None

    def _why(self, run: Run, error: Exception) -> _Stop | _Killed | _Starved:
        """Return why the program gave no answer. Whatever it can have caused itself counts as its own fault."""
        match error:
            case TimeOut():
                own = self._clock.seconds() >= USED_UP * self._wall
                return _Stop(f"it took more than {self._wall:g} s", "time") if own else _Starved()
            case Flood():
                return _Stop("its output is too long", "output")
        ended = run.by_itself()
        if ended is None:
            return _Stop("it closed its end of the pipe")
        if -ended.status in (signal.SIGKILL, signal.SIGXCPU):
            self._spent += ended.cpu_seconds  # over all attempts, so that no program takes many times its limit
            if self._spent > self._cpu / 2:  # the kernel counts in ticks for its limit, and exactly for what we read
                return _Stop(f"it took more than {self._cpu} s of processor time", "cpu")
        return _Killed() if ended.status == -signal.SIGKILL else _Stop(f"it ended with status {ended.status}")


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line, but for white space at the ends of lines and empty lines at the end."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return ours == theirs


def same_value(value: object, expected: object, tolerance: float) -> bool:
    """Compare as JSON: tuples are lists, keys are text, true is no number, and numbers may differ by the tolerance.

    The tolerance is relative for numbers beyond 1, but not where one of the two is whole. Two whole numbers must be equal.
    """
    if isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(same_value(a, b, tolerance) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        named = {_json_key(key): item for key, item in value.items()}
        if len(named) != len(value) or named.keys() != expected.keys():
            return False
        return all(same_value(named[key], item, tolerance) for key, item in expected.items())
    if isinstance(expected, bool) or isinstance(value, bool) or not isinstance(expected, int | float):
        return type(value) is type(expected) and value == expected
    if not isinstance(value, int | float):
        return False
    return _same_number(value, expected, tolerance)


def _json_key(key: object) -> object:
    """Return a dictionary's key as JSON writes it."""
    if not isinstance(key, bool | int | float | None) or (isinstance(key, int) and key.bit_length() > 64):
        return key
    return json.dumps(key)


def _same_number(value: float, expected: float, tolerance: float) -> bool:
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    try:
        if not (math.isfinite(value) and math.isfinite(expected)):
            return value == expected or (math.isnan(value) and math.isnan(expected))
        scale = 1.0 if isinstance(value, int) or isinstance(expected, int) else max(1.0, abs(expected))
        return value == expected or abs(value - expected) <= tolerance * scale
    except OverflowError:  # a whole number that no float holds
        return False
