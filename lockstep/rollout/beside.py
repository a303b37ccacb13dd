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
    """A completion without its request, which the driver has, but with its text and answer."""

    request_id: str
    ids: TokenIds
    logprobs: tuple[float, ...]
    finish: FinishReason
    version: int
    read: tuple[str, str]
    routes: bytes


@dataclass(frozen=True, slots=True)
class GradedReply:
    """The grade of a reply that was returned before."""

    request_id: str
    graded: tuple[Grade, float, float]
    """The grade, the seconds that grading took, and those in which the engine waited for it with nothing else to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """Replies as they end, and grades as they come: the driver takes in the one while the others are made."""

    replies: list[SampledReply]
    grades: list[GradedReply]


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
        self._waiting: set[str] = set()
        """Ids of the replies whose grade is still to come."""
        self._ungraded: list[tuple[Completion, str]] = []
        """Those of them that no grader has, and their answers."""
        self._since = 0.0
        """When the first of these came."""

    @property
    def waiting(self) -> int:
        """Number of replies whose grade `take` has not returned yet."""
        return len(self._waiting)

    def take(self, found: Sequence[Completion], until: float, most: int) -> Found:
        """Take completions; returns them, read, and the grades that have come for those that are to be graded.

        Without new ones it waits for grades until there are `most`, or until this time of the monotonic clock. Raises
        LockstepError if the grader cannot work at all.
        """
        now = time.monotonic()
        self._since = self._since if self._ungraded else now
        replies = [_reply(one, read) for one, read in zip(found, self._read([one.ids for one in found]), strict=True)]
        for one, reply in zip(found, replies, strict=True):
            if one.request.graded:
                self._waiting.add(reply.request_id)
                self._ungraded.append((one, reply.read[1]))
        # With more to come at once, the grader's threads would only hold them up.
        if len(found) < most or now > self._since + POSTPONED_SECONDS:
            self._grade_all()
        grades: list[GradedReply] = []
        while self._grader is not None:
            keys = self._grader.done(0.0 if found else max(0.0, until - time.monotonic()))
            for key in keys:
                graded = self._grader.grade(key), self._grader.seconds(key), self._grader.held
                self._grader.held = 0.0  # the first of those that were waited for has told it
                grades.append(GradedReply(key, graded))
            self._waiting.difference_update(keys)
            if not self._waiting:
                self.drop()
            if found or not keys or len(grades) >= most:
                break
        return Found(replies, grades)

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
        if not self._ungraded:
            return
        if self._grader is None:
            self._grader = AsyncGrader(self.build())
        for asked in {one.request.graded for one, _ in self._ungraded} - self._prompts.keys():
            self._prompts[asked] = loads(asked.encode())
        self._grader.submit_many([(o.request.id, self._prompts[o.request.graded], a) for o, a in self._ungraded])
        self._ungraded.clear()


def _reply(one: Completion, read: tuple[str, str]) -> SampledReply:
    return SampledReply(one.request.id, one.ids, one.logprobs, one.finish, one.version, read, one.routes)
