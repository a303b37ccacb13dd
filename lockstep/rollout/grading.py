"""Grading in the background: replies are graded while the engine samples the next ones.

A grader with worker processes is called from a few threads, which only wait for it; any other grader runs immediately in the
caller. A grade depends on the prompt and the reply alone, so the order of replies does not matter.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from lockstep.errors import EngineError, LockstepError
from lockstep.tasks.base import BuiltTask
from lockstep.types import Grade, Metrics, Prompt
from lockstep.user_code import describe
from lockstep.verifiers.base import CANCEL, unscored


class AsyncGrader:
    """Grades the replies of one round of sampling or one evaluation, by key. Leaving its context drops ungraded replies."""

    def __init__(self, task: BuiltTask) -> None:
        self._task = task
        workers = task.workers
        self._cancel = threading.Event()
        self._threads: ThreadPoolExecutor | None = None
        if workers:
            self._threads = ThreadPoolExecutor(workers, "lockstep-grade", CANCEL.set, (self._cancel,))
        self._grades: dict[str, Future[tuple[Grade, float]]] = {}
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
        if key in self._grades:
            raise EngineError("the engine returned it twice", where=f"reply {key}")
        self.open += 1
        if self._threads is not None and self._task.workers_for(prompt):
            found = self._threads.submit(self._timed, prompt, reply)
        else:
            found = Future()
            found.set_result(self._timed(prompt, reply))
            self.held += found.result()[1]
        self._grades[key] = found
        found.add_done_callback(lambda _: self._done.put(key))

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
        future = self._grades[key]
        if future.done():
            return future.result()[0]
        start = time.perf_counter()
        grade, _ = future.result()
        self.held += time.perf_counter() - start
        return grade

    @property
    def metrics(self) -> Metrics:
        """Return the seconds of all grading, and those of the slowest reply; waits for replies that are being graded."""
        seconds = [future.result()[1] for future in self._grades.values()]
        return {"time/grade_work": sum(seconds), "time/grade_slowest": max(seconds, default=0.0)}

    def _timed(self, prompt: Prompt, reply: str) -> tuple[Grade, float]:
        """Return the grade and its seconds. A grader's own mistake leaves the reply unscored, never 0."""
        start = time.perf_counter()
        try:
            grade = self._task.grade(prompt, reply)
        except LockstepError:
            raise
        except Exception as error:
            grade = unscored(f"the verifier raised {describe(error, None)}")
        return grade, time.perf_counter() - start
