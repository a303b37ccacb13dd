"""Groups from graded replies: taken as they come out of the engine, and graded beside the sampling of the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from lockstep.chat.chat import ChatFormat
from lockstep.types import Completion, Group, Metrics, Prompt, Rollout, Task
from lockstep.verifiers.beside import Grading


class Grader:
    """Grades the replies of one round of sampling. A context: leaving it drops what was not graded."""

    def __init__(self, task: Task, chat: ChatFormat) -> None:
        self._grading, self._chat = Grading(task), chat
        self._texts: dict[str, str] = {}
        self.held = 0.0
        """Seconds that `take` has held its caller up: reading the reply, and grading it unless that is done elsewhere."""

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grading.__exit__(kind, error, trace)

    def take(self, prompt: Prompt, completion: Completion) -> None:
        """Grade a reply, now or beside what comes next. Raises EngineError if it was taken before."""
        start = time.perf_counter()
        id = completion.request.id
        self._texts[id], answer = self._chat.read(completion.ids)
        self._grading.submit(id, prompt, answer)
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
        return self._grading.metrics

    def _rollout(self, prompt: Prompt, sample: int, done: Completion) -> Rollout:
        id = done.request.id
        if id not in self._grading:
            self.take(prompt, done)
        return Rollout(
            prompt,
            done.request.prompt_ids,
            done.ids,
            done.logprobs,
            (True,) * len(done.ids),
            self._texts[id],
            done.finish,
            done.version,
            self._grading.grade(id),
            sample,
            done.request.prefix,
        )
