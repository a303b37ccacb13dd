"""Runs environments: fast built-in ones in this process, all others in one process per episode, which can be killed."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import BaseModel

from lockstep.envs import worker
from lockstep.envs.turns import fault_of
from lockstep.errors import TaskError
from lockstep.types import Env, Prompt, Turn
from lockstep.user_code import describe
from lockstep.workers.process import START_SECONDS, Forked, Gone, Template, Work

MOST = 256
"""Most processes of one task at a time; further episodes wait for one to end."""


LARGEST = 1 << 24
"""Most bytes of a turn; a longer one ends the episode."""


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
    fault = fault_of(turn)
    return Fault("error", fault) if fault else turn


@dataclass(slots=True)
class _Episode:
    """Process of one environment."""

    key: str
    process: Forked
    deadline: float | None = None
    """Time by which it must have answered; None while it is idle."""
    writing: bool = False
    """A part of a call waits for room in the pipe."""


class ProcessRunner:
    """Runner with one process per episode, which is killed when one step takes longer than `seconds`.

    The processes are forked from one that has imported the task's code, so that starting one takes milliseconds. A step's time
    counts from its request, whatever the number of other episodes.
    """

    def __init__(self, settings: BaseModel, seconds: float, most: int = MOST) -> None:
        """Start the process with the task's settings; `most` episodes run at a time. Raises TaskError if it cannot."""
        arguments = {"settings": settings.model_dump_json()}
        code = (f"task.{key}={getattr(settings, key)}" for key in ("path", "env", "kind") if hasattr(settings, key))
        self._where = next(code, "task")
        self._work = Work(worker.__name__, arguments, "task", seconds, stateful=True, max_answer=LARGEST)
        self._seconds, self._most = seconds, most
        self._open: dict[str, _Episode] = {}
        self._waiting: deque[tuple[str, list[Mapping[str, Any]]]] = deque()
        self._answers: list[Answer] = []
        self._selector = selectors.DefaultSelector()
        self._template = self._started()

    # --- Runner ---------------------------------------------------------------------------------------------------
    def begin(self, key: str, prompt: Prompt, seed: int) -> None:
        self._waiting.append((key, [{"prompt": prompt, "seed": seed}]))
        self._admit()

    def step(self, key: str, reply: str) -> None:
        call = {"reply": reply.encode("utf-8", "replace").decode()}
        for waiting, calls in self._waiting:
            if waiting == key:
                calls.append(call)
                return
        if key in self._open:
            self._send(self._open[key], call)

    def poll(self, seconds: float) -> list[Answer]:
        until = time.monotonic() + seconds
        while True:
            soonest = min((e.deadline for e in self._open.values() if e.deadline is not None), default=until)
            wait = 0.0 if self._answers else max(0.0, min(until, soonest) - time.monotonic())
            for ready, _ in self._selector.select(wait):
                self._attend(ready.data)
            self._end_late()
            if self._answers or time.monotonic() >= until:
                answers, self._answers = self._answers, []
                return answers

    def end(self, key: str) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] != key)
        episode = self._open.pop(key, None)
        if episode is not None:
            self._watch(episode, writing=False)
            self._selector.unregister(episode.process.link.answers)
            episode.process.kill()  # with all that it has started
            episode.process.end(grace=0.0)
        self._admit()

    def close(self) -> None:
        self._waiting.clear()
        for key in list(self._open):
            self.end(key)
        self._template.end()
        self._selector.close()

    # --- processes ------------------------------------------------------------------------------------------------
    def _started(self) -> Template:
        """Start the process that the others are forked from, and wait until it has imported the task's code."""
        template = Template(self._work)
        try:
            template.start()
        except Gone:
            template.end()
            raise TaskError(
                f"the process for environments ended while it imported the task's code, or needed more than {START_SECONDS:g} s",
                where=self._where,
                fix="import the task's code in Python to see why; import less at the top level of its file",
            ) from None
        except BaseException:
            template.end()
            raise
        return template

    def _admit(self) -> None:
        while self._waiting and len(self._open) < self._most:
            key, calls = self._waiting.popleft()
            episode = self._open[key] = _Episode(key, self._fork())
            self._selector.register(episode.process.link.answers, selectors.EVENT_READ, episode)
            for call in calls:
                self._send(episode, call)

    def _fork(self) -> Forked:
        """Fork a process; if the one that is forked from was killed, start a new one first."""
        try:
            return Forked(self._work, self._template)
        except Gone:
            self._template.end()
            self._template = self._started()
            return Forked(self._work, self._template)

    def _send(self, episode: _Episode, call: Mapping[str, Any]) -> None:
        try:
            line = episode.process.request(call)
        except TypeError as error:
            self._fail(episode, Fault("error", f"its prompt's data cannot be sent to a process: {error}"))
            return
        episode.deadline = time.monotonic() + self._seconds
        self._attend(episode, line)

    def _attend(self, episode: _Episode, line: bytes = b"") -> None:
        """Send what there is room for, and take what has come."""
        link = episode.process.link
        try:
            link.send(line)
            while self._open.get(episode.key) is episode and (message := link.receive()) is not None:
                self._take(episode, message)
        except Gone:
            self._fail(episode, Fault("error", "its process ended"))
        else:
            if self._open.get(episode.key) is episode:
                self._watch(episode, writing=link.pending)

    def _watch(self, episode: _Episode, *, writing: bool) -> None:
        """Wait for room in its pipe, or no longer."""
        if writing and not episode.writing:
            self._selector.register(episode.process.link.requests, selectors.EVENT_WRITE, episode)
        if episode.writing and not writing:
            self._selector.unregister(episode.process.link.requests)
        episode.writing = writing

    def _take(self, episode: _Episode, message: dict[str, Any]) -> None:
        if "ready" in message:
            return
        episode.deadline = None
        found = message.get("ok", message.get("error"))
        self._answers.append((episode.key, found if isinstance(found, Turn) else Fault("error", str(found))))

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
