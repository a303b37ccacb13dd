"""Grades replies beside the engine that sampled them, in its process, while it samples others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from lockstep.rollout.grading import AsyncGrader
from lockstep.tasks.base import BuiltTask
from lockstep.types import Completion, FinishReason, Grade, Prompt, TokenIds
from lockstep.workers.wire import loads


@dataclass(frozen=True, slots=True)
class SampledReply:
    """A completion without its request, which the driver has, but with its text and answer, and its grade if it has one."""

    request_id: str
    ids: TokenIds
    logprobs: tuple[float, ...]
    finish: FinishReason
    version: int
    read: tuple[str, str]
    routes: bytes
    graded: tuple[Grade, float, float] | None = None
    """Its grade, the seconds that grading took, and those in which the engine waited for it with nothing else to do."""


POSTPONED_SECONDS = 0.05
"""Longest time that replies wait to be graded while more arrive at once."""
ReadMany = Callable[[Sequence[TokenIds]], list[tuple[str, str]]]
"""ChatFormat.read_many."""


class BesideEngine:
    """Reads the completions of an engine, and grades those whose requests say so."""

    def __init__(self, build: Callable[[], BuiltTask], read: ReadMany) -> None:
        """Take what builds the task that grades: `build`, or the first reply that needs it, has it do so."""
        self.build, self._read = cache(build), read
        self._prompts: dict[str, Prompt] = {}
        """Questions by their messages: all samples of a prompt bring the same."""
        self._grader: AsyncGrader | None = None
        self._waiting: dict[str, tuple[Completion, tuple[str, str]]] = {}
        """Completions without their grade, with their text and answer, by id."""
        self._ungraded: list[tuple[Completion, str]] = []
        """Those of them that no grader has, and their answers."""
        self._since = 0.0
        """When the first of these came."""

    @property
    def waiting(self) -> int:
        """Number of completions that `take` has not returned yet."""
        return len(self._waiting)

    def take(self, found: Sequence[Completion], until: float, most: int) -> list[SampledReply]:
        """Take completions; returns those that are read, and graded if they are to be.

        Without new ones it waits for grades until there are `most`, or until this time of the monotonic clock. Raises
        LockstepError if the grader cannot work at all.
        """
        ready, now = list[SampledReply](), time.monotonic()
        self._since = self._since if self._ungraded else now
        for one, read in zip(found, self._read([one.ids for one in found]), strict=True):
            if one.request.graded:
                self._waiting[one.request.id] = one, read
                self._ungraded.append((one, read[1]))
            else:
                ready.append(_reply(one, read))
        # With more to come at once, the grader's threads would only hold them up.
        if len(found) < most or now > self._since + POSTPONED_SECONDS:
            self._grade_all()
        while self._grader is not None:
            keys = self._grader.done(0.0 if found else max(0.0, until - time.monotonic()))
            for key in keys:
                graded = self._grader.grade(key), self._grader.seconds(key), self._grader.held
                self._grader.held = 0.0  # the first of those that were waited for has told it
                ready.append(_reply(*self._waiting.pop(key), graded))
            if not self._waiting:
                self.drop()
            if found or not keys or len(ready) >= most:
                break
        return ready

    def drop(self) -> None:
        """Forget all completions; calls of graders that have begun are waited for, at most as long as their limits say."""
        if self._grader is not None:
            self._grader.__exit__(None, None, None)
        self._grader = None
        self._waiting.clear()
        self._ungraded.clear()
        self._prompts.clear()

    def _grade_all(self) -> None:
        """Have all that wait graded."""
        for one, answer in self._ungraded:
            if self._grader is None:
                self._grader = AsyncGrader(self.build())
            asked = one.request.graded
            if asked not in self._prompts:
                self._prompts[asked] = loads(asked.encode())
            self._grader.submit(one.request.id, self._prompts[asked], answer)
        self._ungraded.clear()


def _reply(one: Completion, read: tuple[str, str], graded: tuple[Grade, float, float] | None = None) -> SampledReply:
    return SampledReply(one.request.id, one.ids, one.logprobs, one.finish, one.version, read, one.routes, graded)
