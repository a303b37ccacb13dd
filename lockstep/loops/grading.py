"""Grading beside generation: replies are graded as they come out of the engine, while it samples the others.

A verifier that works in processes of its own is called from a few threads, which only wait for it; any other grades here, at
once. A grade depends on the prompt and the reply alone, so in whatever order replies come the groups are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from lockstep.chat.chat import ChatFormat
from lockstep.errors import EngineError, LockstepError
from lockstep.types import Completion, Grade, Group, Metrics, Prompt, Rollout, Task
from lockstep.user_code import describe
from lockstep.verifiers.base import unscored, workers_of


class Grader:
    """Grades the replies of one round of sampling. A context: leaving it drops what was not graded."""

    def __init__(self, task: Task, chat: ChatFormat) -> None:
        self._task, self._chat = task, chat
        workers = workers_of(task)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="lockstep-grade") if workers else None
        self._grades: dict[str, Future[tuple[Grade, float]] | tuple[Grade, float]] = {}
        self.held = 0.0
        """Seconds that `take` has held its caller up: reading the reply, and grading it unless that is done elsewhere."""

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def take(self, prompt: Prompt, completion: Completion) -> None:
        """Grade a reply, now or beside what comes next. Raises EngineError if it was taken before."""
        start = time.perf_counter()
        if completion.request.id in self._grades:
            raise EngineError("the engine returned it twice", where=f"reply {completion.request.id}")
        text = self._chat.answer(completion.ids)
        if self._threads is None:
            self._grades[completion.request.id] = self._grade(prompt, text)
        else:
            self._grades[completion.request.id] = self._threads.submit(self._grade, prompt, text)
        self.held += time.perf_counter() - start

    def groups(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        """The prompts with their samples, ids as they were sampled; waits for what is still being graded.

        Raises LockstepError if a verifier cannot work at all.
        """
        return [
            Group(prompt, tuple(self._rollout(prompt, sample, done) for sample, done in enumerate(row)))
            for prompt, row in zip(prompts, completions, strict=True)
        ]

    @property
    def metrics(self) -> Metrics:
        """What grading took, after `groups`: all work, and the slowest reply; most of it beside sampling."""
        seconds = [self._result(id)[1] for id in self._grades]
        return {"time/grade_work": sum(seconds), "time/grade_slowest": max(seconds, default=0.0)}

    def _grade(self, prompt: Prompt, text: str) -> tuple[Grade, float]:
        """The grade, and the seconds that it took. A verifier's own mistake leaves the reply unscored, never 0."""
        start = time.perf_counter()
        try:
            grade = self._task.grade(prompt, text)
        except LockstepError:
            raise
        except Exception as error:
            grade = unscored(f"the verifier raised {describe(error, None)}")
        return grade, time.perf_counter() - start

    def _result(self, id: str) -> tuple[Grade, float]:
        found = self._grades[id]
        return found.result() if isinstance(found, Future) else found

    def _rollout(self, prompt: Prompt, sample: int, done: Completion) -> Rollout:
        if done.request.id not in self._grades:
            self.take(prompt, done)
        return Rollout(
            prompt,
            done.request.prompt_ids,
            done.ids,
            done.logprobs,
            (True,) * len(done.ids),
            self._chat.decode(done.ids),
            done.finish,
            done.version,
            self._result(done.request.id)[0],
            sample,
            done.request.prefix,
        )
