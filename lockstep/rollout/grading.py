"""Grading in the background: replies are graded while the engine samples the next ones.

A grader with worker processes is called from a few threads, which only wait for it; any other grader runs immediately in the
caller. A thread takes several waiting replies to a fast grader at a time, fewer the fewer wait, so that all threads end at
about the same time. A grade depends on the prompt and the reply alone (for a grader that compares the samples of a prompt,
on all of them), so the order of replies does not matter.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from lockstep.errors import DEFECT, EngineError, LockstepError
from lockstep.tasks.base import BuiltTask
from lockstep.types import Grade, Metrics, Prompt, ReplyText
from lockstep.user_code import describe
from lockstep.verifiers.base import CANCEL, Asked, GradeMany, unscored
from lockstep.workers.wire import dumps

MOST = 16
"""Most calls that a thread takes at a time."""
FAST_SECONDS = 0.005
"""Several are taken only of a grader whose calls took less so far, on average."""


@dataclass(slots=True)
class _Call:
    """One call of a grader, for one reply or all samples of a prompt."""

    keys: Sequence[str]
    alone: Callable[[], list[Grade]]
    asked: Asked
    together: GradeMany | None = None
    """Function that makes it together with others."""
    found: list[Grade] | BaseException | None = None
    """Its grades, or what is raised instead of them; None until it was made. A Future for each would take longer than a grade."""
    seconds: float = 0.0


class AsyncGrader:
    """Grades the replies of one round of sampling or one evaluation, by key. Leaving its context drops ungraded replies."""

    def __init__(self, task: BuiltTask, *, beside: bool = False) -> None:
        """Take the task. `beside`: engines have graders of their own, see `BesideEngine`."""
        self._task, self._workers, self._beside = task, task.workers, beside
        self._cancel = threading.Event()
        self._threads: ThreadPoolExecutor | None = None
        if self._workers:
            self._threads = ThreadPoolExecutor(self._workers, "lockstep-grade", CANCEL.set, (self._cancel,))
        self._lock = threading.Condition()
        """Guard of the three that follow; it is told when calls were made."""
        self._waiting: deque[_Call] = deque()
        self._running = 0
        """Threads that take calls as long as any wait."""
        self._spent: dict[GradeMany, tuple[float, int]] = {}
        """Seconds and number of the calls that each grader has answered."""
        self._calls: list[_Call] = []
        self._grades: dict[str, tuple[_Call, int]] = {}
        """The call that grades a reply, and the reply's place in it."""
        self._questions: dict[str, str] = {}
        """Results of `question` by prompt id: the samples of a group share them."""
        self._elsewhere: list[float] = []
        """Seconds of grading beside the engine, by reply."""
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.open = 0
        """Number of replies that `done` has not returned yet."""
        self.held = 0.0
        """Seconds in which callers had to wait: immediate grading, and waiting for the rest. A GPU may decode meanwhile."""

    def __enter__(self) -> AsyncGrader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._cancel.set()
            for call in self._waiting:
                call.found = CancelledError()
            self._waiting.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def question(self, prompt: Prompt) -> str:
        """Return what a grader beside the engine is told of a prompt; nothing if its replies have to be graded here."""
        if self._beside and prompt.id not in self._questions:
            asked, self._questions[prompt.id] = self._task.apart(prompt), ""
            if asked is not None:
                with suppress(TypeError):  # it has data that cannot be sent
                    self._questions[prompt.id] = dumps(asked).decode()
        return self._questions.get(prompt.id, "")

    def submit(self, key: str, prompt: Prompt, reply: str) -> None:
        """Grade a reply, immediately or in the background. Raises EngineError for a key that was submitted before."""
        self.submit_many([(key, prompt, reply)])

    def submit_many(self, asked: Sequence[tuple[str, Prompt, str]]) -> None:
        """Grade replies as `submit` does, each by its key: threads know of all before they take the first."""
        self._wait([call for one in asked if (call := self._entered(one[1], self._call(*one))) is not None])

    def _call(self, key: str, prompt: Prompt, reply: str) -> _Call:
        return _Call((key,), lambda: [self._task.grade(prompt, reply)], (prompt, (reply,)))

    def submit_replies(self, prompt: Prompt, replies: Mapping[str, ReplyText]) -> None:
        """Grade replies to one prompt, by their keys, in one call. Raises EngineError as `submit` does."""
        given = list(replies.values())
        call = _Call((*replies,), lambda: self._task.grade_replies(prompt, given), (prompt, given))
        if self._entered(prompt, call) is not None:
            self._wait([call])

    def _entered(self, prompt: Prompt, call: _Call) -> _Call | None:
        """Note a call; returns it if a thread has to make it, and None if it is made."""
        if twice := next((key for key in call.keys if key in self._grades), None):
            raise EngineError(
                "the engine returned this reply twice",
                where=f"reply {twice}",
                fix=f"resume from the last checkpoint; {DEFECT}",
            )
        self.open += len(call.keys)
        self._calls.append(call)
        for place, key in enumerate(call.keys):
            self._grades[key] = (call, place)
        if self._threads is None or not self._task.workers_for(prompt):
            self._make([call])
            self.held += call.seconds
            return None
        if (found := self._task.grades_many(prompt)) is not None:
            call.together, own = found
            call.asked = (own, call.asked[1])
        return call

    # --- threads --------------------------------------------------------------------------------------------------
    def _wait(self, calls: Sequence[_Call], *, again: bool = False) -> None:
        """Have threads make calls, before all others if they were taken `again`; drop them if the grader has been left."""
        with self._lock:
            if self._threads is None or self._cancel.is_set():
                for call in calls:
                    call.found = CancelledError()
                return
            if again:
                self._waiting.extendleft(reversed(calls))
            else:
                self._waiting.extend(calls)
            for _ in range(min(len(calls), self._workers - self._running)):
                self._running += 1
                self._threads.submit(self._serve)

    def _serve(self) -> None:
        """Make the calls that wait, until none does."""
        while calls := self._take():
            self._make(calls)

    def _take(self) -> list[_Call]:
        with self._lock:
            if not self._waiting:
                self._running -= 1
                return []
            together, count = self._waiting[0].together, 1
            if together is not None:
                seconds, answered = self._spent.get(together, (0.0, 0))
                if seconds < FAST_SECONDS * answered:
                    count = min(MOST, math.ceil(len(self._waiting) / (2 * self._workers)))
            taken = [self._waiting.popleft()]
            while len(taken) < count and self._waiting and self._waiting[0].together == together:
                taken.append(self._waiting.popleft())
            return taken

    def _make(self, calls: Sequence[_Call]) -> None:
        """Make calls of one grader; those that it does not come to wait again."""
        left, together = deque(calls), calls[0].together
        made: list[_Call] = []
        spent, answered = 0.0, 0

        def late() -> None:
            self._report(made)
            self._wait([left.pop() for _ in range(len(left) - 1)][::-1], again=True)

        answers: Iterator[list[Grade]] = (call.alone() for call in calls)
        if together is not None:
            answers = together([call.asked for call in calls], late)
        while left:
            call, start = left[0], time.perf_counter()
            try:
                call.found = next(answers)
            except StopIteration:
                break
            except Exception as error:  # a grader's own mistake leaves its replies unscored, never 0
                reason = f"the verifier raised {describe(error, None)}"
                call.found = error if isinstance(error, LockstepError) else [unscored(reason)] * len(call.keys)
            except BaseException as error:  # raised where the grade is read
                call.found = error
            call.seconds = time.perf_counter() - start
            spent, answered = spent + call.seconds, answered + 1
            made.append(left.popleft())
        self._report(made)
        if left:
            self._wait(left, again=True)
        if together is not None:
            with self._lock:
                before = self._spent.get(together, (0.0, 0))
                self._spent[together] = (before[0] + spent, before[1] + answered)

    def _report(self, made: list[_Call]) -> None:
        """Have `done` return the replies of these calls; several together, so that who waits for them is woken once."""
        for call in made:
            for key in call.keys:
                self._done.put(key)
        made.clear()
        with self._lock:
            self._lock.notify_all()

    # --- results --------------------------------------------------------------------------------------------------
    def done(self, seconds: float = 0.0) -> list[str]:
        """Return keys of replies graded since the last call; waits at most `seconds` for the first, if any is pending."""
        found: list[str] = []
        start = time.perf_counter()
        try:
            if self.open and seconds > 0:
                try:
                    found.append(self._done.get(timeout=seconds))
                finally:
                    self.held += time.perf_counter() - start
            while len(found) < self.open:
                found.append(self._done.get_nowait())
        except queue.Empty:
            pass
        self.open -= len(found)
        return found

    def grade(self, key: str) -> Grade:
        """Return the grade of a submitted reply; waits for it. Raises LockstepError if the grader cannot work at all."""
        call, place = self._grades[key]
        if call.found is None:
            start = time.perf_counter()
            with self._lock:
                self._lock.wait_for(lambda: call.found is not None)
            self.held += time.perf_counter() - start
        if isinstance(call.found, BaseException):
            raise call.found
        assert call.found is not None
        return call.found[place]

    def seconds(self, key: str) -> float:
        """Return how long the call took that graded a reply."""
        return self._grades[key][0].seconds

    def noted(self, grade: Grade, seconds: float, held: float) -> Grade:
        """Count a reply that was graded beside the engine, and what was waited for it; returns its grade."""
        self._elsewhere.append(seconds)
        self.held += held
        return grade

    @property
    def metrics(self) -> Metrics:
        """Return the seconds of all grading so far, and those of the slowest reply."""
        seconds = [call.seconds for call in self._calls] + self._elsewhere
        return {"time/grade_work": sum(seconds), "time/grade_slowest": max(seconds, default=0.0)}
