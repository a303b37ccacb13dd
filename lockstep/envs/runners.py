"""Runners of environments: in this process for quick built-in ones, else each in a separate process."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import BaseModel

from lockstep.envs import wire
from lockstep.errors import TaskError
from lockstep.types import Env, Prompt, Turn
from lockstep.user_code import describe

MOST = 256
"""Most processes of one task at a time; further episodes wait for one to end."""
START_SECONDS = 120.0
"""Time limit for the import of a task's code."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Failure of an environment; its sample cannot be scored."""

    kind: Literal["timeout", "error"]
    why: str


Answer: TypeAlias = tuple[str, Turn | Fault]
"""Key of an episode, and its environment's turn or failure."""


class Runner(Protocol):
    """Runs the environments of a task. Each begin and step is answered once, by a later poll, in any order."""

    def begin(self, key: str, prompt: Prompt, seed: int) -> None: ...

    def step(self, key: str, reply: str) -> None: ...

    def poll(self, seconds: float) -> list[Answer]:
        """Return the answers since the last call; waits at most `seconds` for the first."""

    def end(self, key: str) -> None:
        """End the episode, whether its own environment has ended or not."""

    def close(self) -> None: ...


class InlineRunner:
    """Runner of environments that come with Lockstep and take microseconds for any input."""

    def __init__(self, make: Callable[[Prompt], Env]) -> None:
        self._make = make
        self._envs: dict[str, Env] = {}
        self._answers: list[Answer] = []

    def begin(self, key: str, prompt: Prompt, seed: int) -> None:
        def started() -> Turn:
            self._envs[key] = self._make(prompt)
            return self._envs[key].start(seed)

        self._answers.append((key, _tried(started)))

    def step(self, key: str, reply: str) -> None:
        self._answers.append((key, _tried(lambda: self._envs[key].step(reply))))

    def poll(self, seconds: float) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def end(self, key: str) -> None:
        self._envs.pop(key, None)

    def close(self) -> None:
        self._envs.clear()


def _tried(call: Callable[[], Turn]) -> Turn | Fault:
    try:
        turn = call()
    except Exception as error:
        return Fault("error", describe(error, None))
    fault = wire.fault_of(turn)
    return Fault("error", fault) if fault else turn


@dataclass(slots=True)
class _Episode:
    """Process of one environment."""

    key: str
    channel: socket.socket
    pid: int = 0
    deadline: float | None = None
    """Time by which it must have answered; None while it is idle."""
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class ProcessRunner:
    """Runner with one process per episode, which is killed when one step takes longer than `seconds`.

    The processes are forked from one that has imported the task's code, so that starting one takes milliseconds. A step's time
    counts from its request, whatever the number of other episodes.
    """

    def __init__(self, settings: BaseModel, seconds: float) -> None:
        """Start the process with the task's settings. Raises TaskError if the task's code cannot be imported."""
        self._settings, self._seconds = settings.model_dump_json(), seconds
        self._open: dict[str, _Episode] = {}
        self._waiting: deque[tuple[str, list[bytes]]] = deque()
        self._answers: list[Answer] = []
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start()

    # --- Runner ---------------------------------------------------------------------------------------------------
    def begin(self, key: str, prompt: Prompt, seed: int) -> None:
        try:
            message = wire.packed({"op": "start", "prompt": wire.prompt_to(prompt), "seed": seed})
        except (TypeError, ValueError) as error:
            self._answers.append((key, Fault("error", f"its prompt's data cannot be sent to a process: {error}")))
            return
        self._waiting.append((key, [message]))
        self._admit()

    def step(self, key: str, reply: str) -> None:
        message = wire.packed({"op": "step", "reply": reply.encode("utf-8", "replace").decode()})
        for waiting, messages in self._waiting:
            if waiting == key:
                messages.append(message)
                return
        if key in self._open:
            self._send(self._open[key], message)

    def poll(self, seconds: float) -> list[Answer]:
        until = time.monotonic() + seconds
        while True:
            soonest = min((e.deadline for e in self._open.values() if e.deadline is not None), default=until)
            wait = 0.0 if self._answers else max(0.0, min(until, soonest) - time.monotonic())
            for ready, events in self._selector.select(wait):
                self._attend(ready.data, events)
            self._end_late()
            if self._answers or time.monotonic() >= until:
                answers, self._answers = self._answers, []
                return answers

    def end(self, key: str) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] != key)
        episode = self._open.pop(key, None)
        if episode is not None:
            self._selector.unregister(episode.channel)
            episode.channel.close()
            _kill(episode.pid)
        self._admit()

    def close(self) -> None:
        self._waiting.clear()
        for key in list(self._open):
            self.end(key)
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._selector.close()

    # --- processes ------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        """Start the process that the others are forked from, and wait until it has imported the task's code."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep.envs.zygote", str(theirs.fileno()), self._settings],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._control = ours
        ours.settimeout(START_SECONDS)
        found: dict[str, Any] | None = None
        buffer = bytearray()
        try:
            while found is None and (data := ours.recv(1 << 16)):
                buffer += data
                found = wire.unpack(buffer)
        except TimeoutError:
            self._process.kill()
            raise TaskError(
                f"its code was not imported in {START_SECONDS:g} s",
                where="task",
                fix="import less at the file's top level",
            ) from None
        if found is None:
            raise TaskError(
                f"the process for its environments ended with code {self._process.wait()} at the start",
                where="task",
                fix="see its output above",
            )
        if found:
            raise TaskError(found["what"], where=found["where"], fix=found["fix"])
        ours.settimeout(None)

    def _admit(self) -> None:
        while self._waiting and len(self._open) < MOST:
            key, messages = self._waiting.popleft()
            ours, theirs = socket.socketpair()
            with theirs:
                self._hand_over(theirs)
            ours.setblocking(False)
            episode = self._open[key] = _Episode(key, ours)
            self._selector.register(ours, selectors.EVENT_READ, episode)
            for message in messages:
                self._send(episode, message)

    def _hand_over(self, channel: socket.socket) -> None:
        """Fork a process for the channel; if the forking process was killed, start a new one first."""
        assert self._control is not None
        try:
            socket.send_fds(self._control, [b"."], [channel.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            self._control.close()
            self._start()
            socket.send_fds(self._control, [b"."], [channel.fileno()])

    def _send(self, episode: _Episode, message: bytes) -> None:
        episode.deadline = time.monotonic() + self._seconds
        episode.unsent += message
        self._attend(episode, selectors.EVENT_WRITE)

    def _attend(self, episode: _Episode, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE and episode.unsent:
                with contextlib.suppress(BlockingIOError):
                    del episode.unsent[: episode.channel.send(episode.unsent)]
            if events & selectors.EVENT_READ:
                data = episode.channel.recv(1 << 20)
                if not data:
                    raise ConnectionResetError
                episode.received += data
                while (message := wire.unpack(episode.received)) is not None:
                    self._take(episode, message)
        except (BrokenPipeError, ConnectionResetError):
            self._fail(episode, Fault("error", "its process ended"))
        except (ValueError, KeyError, TypeError) as error:
            self._fail(episode, Fault("error", f"its process sent something other than a turn: {error}"))
        else:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if episode.unsent else 0)
            if self._open.get(episode.key) is episode:
                self._selector.modify(episode.channel, wanted, episode)

    def _take(self, episode: _Episode, message: dict[str, Any]) -> None:
        if "pid" in message and not episode.pid:
            episode.pid = int(message["pid"])
            return
        episode.deadline = None
        found = Fault("error", str(message["error"])) if "error" in message else wire.turn_from(message["turn"])
        self._answers.append((episode.key, found))

    def _end_late(self) -> None:
        now = time.monotonic()
        for episode in [e for e in self._open.values() if e.deadline is not None and e.deadline <= now]:
            self._fail(episode, Fault("timeout", f"it took longer than {self._seconds:g} s for a step"))

    def _fail(self, episode: _Episode, fault: Fault) -> None:
        if self._open.get(episode.key) is episode:
            self._answers.append((episode.key, fault))
            self.end(episode.key)


def poll_all(runners: Sequence[Runner], seconds: float) -> list[Answer]:
    """Return the answers of all runners; waits at most about `seconds` for the first."""
    if len(runners) == 1:
        return runners[0].poll(seconds)
    until = time.monotonic() + seconds
    while True:
        answers = [answer for runner in runners for answer in runner.poll(0.0)]
        if answers or (left := until - time.monotonic()) <= 0:
            return answers
        time.sleep(min(0.005, left))


def _kill(pid: int) -> None:
    """Kill a process with all that it has started; a process that is gone already is not an error."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
