"""Grading in the background: replies are graded while the engine samples the next ones.

A grader with worker processes is called from a few threads, which only wait for it; any other grader runs immediately in the
caller. A grade depends on the prompt and the reply alone (for a grader that compares the samples of a prompt, on all of them),
so the order of replies does not matter.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeAlias

from lockstep.errors import DEFECT, EngineError, LockstepError
from lockstep.tasks.base import BuiltTask
from lockstep.types import Grade, Metrics, Prompt, ReplyText
from lockstep.user_code import describe
from lockstep.verifiers.base import CANCEL, unscored

_Graded: TypeAlias = tuple[list[Grade], float]
"""Grades of one call, and its seconds."""


class AsyncGrader:
    """Grades the replies of one round of sampling or one evaluation, by key. Leaving its context drops ungraded replies."""

    def __init__(self, task: BuiltTask) -> None:
        self._task = task
        workers = task.workers
        self._cancel = threading.Event()
        self._threads: ThreadPoolExecutor | None = None
        if workers:
            self._threads = ThreadPoolExecutor(workers, "lockstep-grade", CANCEL.set, (self._cancel,))
        self._calls: list[Future[_Graded]] = []
        self._grades: dict[str, tuple[Future[_Graded], int]] = {}
        """The call that grades a reply, and the reply's place in it."""
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.open = 0
        """Number of replies that `done` has not returned yet."""
        self.held = 0.0
        """Seconds in which callers had to wait and nothing was sampled: immediate grading, and waiting for the rest."""

    def __enter__(self) -> AsyncGrader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel.set()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def submit(self, key: str, prompt: Prompt, reply: str) -> None:
        """Grade a reply, immediately or in the background. Raises EngineError for a key that was submitted before."""
        self._submit((key,), prompt, lambda: [self._task.grade(prompt, reply)])

    def submit_replies(self, prompt: Prompt, replies: Mapping[str, ReplyText]) -> None:
        """Grade replies to one prompt, by their keys, in one call. Raises EngineError as `submit` does."""
        self._submit(tuple(replies), prompt, partial(self._task.grade_replies, prompt, list(replies.values())))

    def _submit(self, keys: tuple[str, ...], prompt: Prompt, call: Callable[[], list[Grade]]) -> None:
        if twice := next((key for key in keys if key in self._grades), None):
            raise EngineError(
                "the engine returned this reply twice",
                where=f"reply {twice}",
                fix=f"resume from the last checkpoint; {DEFECT}",
            )
        self.open += len(keys)
        if self._threads is not None and self._task.workers_for(prompt):
            found = self._threads.submit(_timed, call, len(keys))
        else:
            found = Future()
            found.set_result(_timed(call, len(keys)))
            self.held += found.result()[1]
        self._calls.append(found)
        self._grades |= {key: (found, place) for place, key in enumerate(keys)}
        found.add_done_callback(partial(self._graded, keys))

    def _graded(self, keys: tuple[str, ...], _: Future[_Graded]) -> None:
        for key in keys:
            self._done.put(key)

    def done(self, seconds: float = 0.0) -> list[str]:
        """Return keys of replies graded since the last call; waits at most `seconds` for the first, if any is pending."""
        found: list[str] = []
        start = time.perf_counter()
        try:
            if self.open and seconds > 0:
                found.append(self._done.get(timeout=seconds))
                self.held += time.perf_counter() - start
            while len(found) < self.open:
                found.append(self._done.get_nowait())
        except queue.Empty:
            pass
        self.open -= len(found)
        return found

    def grade(self, key: str) -> Grade:
        """Return the grade of a submitted reply; waits for it. Raises LockstepError if the grader cannot work at all."""
        future, place = self._grades[key]
        if future.done():
            return future.result()[0][place]
        start = time.perf_counter()
        grades, _ = future.result()
        self.held += time.perf_counter() - start
        return grades[place]

    @property
    def metrics(self) -> Metrics:
        """Return the seconds of all grading, and those of the slowest reply; waits for replies that are being graded."""
        seconds = [future.result()[1] for future in self._calls]
        return {"time/grade_work": sum(seconds), "time/grade_slowest": max(seconds, default=0.0)}


def _timed(call: Callable[[], list[Grade]], count: int) -> _Graded:
    """Return the grades of a call and its seconds. A grader's own mistake leaves its `count` replies unscored, never 0."""
    start = time.perf_counter()
    try:
        grades = call()
    except LockstepError:
        raise
    except Exception as error:
        grades = [unscored(f"the verifier raised {describe(error, None)}")] * count
    return grades, time.perf_counter() - start
