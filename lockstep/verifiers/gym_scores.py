"""Grades by a reasoning-gym data set's own score function: for questions with several right answers, or answers of many lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import assert_never

from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored
from lockstep.verifiers.extract import read_answer
from lockstep.verifiers.pool import Answered, Died, Exceeded, Failed, Work, WorkerPool

FULL = 1.0 - 1e-9
ATTEMPT = 0.011
"""Most data sets score any text at all 0.01: so little is paid as 0."""
REFUSED = re.compile(r"__|\bimport\b")
"""Some score functions evaluate the answer as an expression: one that holds these is wrong without being looked at."""
QUESTION = "question"
ANSWER = "answer"
METADATA = "metadata"
"""Keys of a prompt's data: its item as the data set made it. The prompt's own answer may be an example from the metadata."""


@cache
def pool() -> WorkerPool:
    """One for all data sets."""
    work = Work(
        {"kind": "reasoning_gym"}, "reasoning-gym's score functions", wall_seconds=10.0, cpu_seconds=5.0, memory=2 << 30
    )
    return WorkerPool(work, min(4, os.cpu_count() or 1))


class GymScores:
    """The boxed answer, else the text between <answer> tags, as the data set scores it.

    Without `partial` only full marks are paid, so that no data set pays for an attempt. An answer that its score function
    cannot stand (it raises, or takes too long) is wrong; the metric score_errors counts them.
    """

    workers = 1

    def __init__(self, dataset: str, settings: str, *, partial: bool) -> None:
        self._dataset, self._settings, self._partial = dataset, settings, partial

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        answer = read_answer(reply, "none")
        text = answer.text if answer.text is not None else _tagged(reply)
        found = {"has_answer": float(bool(text)), "boxed": float(answer.method == "boxed")}
        if not text or REFUSED.search(text):
            return Grade(0.0, {"correct": 0.0, **found}, None if text is None else shown(text), answer.method)
        item = {key: prompt.data.get(key) for key in (QUESTION, ANSWER, METADATA)}
        call = {"dataset": self._dataset, "settings": self._settings, "answer": text, "item": item}
        match pool().call(call):
            case Answered(value):
                return self._scored(float(value), shown(text), answer.method, found)
            case Failed(_) | Exceeded(_, _):
                return Grade(0.0, {"correct": 0.0, "score_errors": 1.0, **found}, shown(text), answer.method)
            case Died(error):
                return unscored(f"reasoning-gym's score function did not live: {error}")
            case outcome:
                assert_never(outcome)

    def _scored(self, score: float, text: str, method: str, found: Mapping[str, float]) -> Grade:
        correct = float(score >= FULL)
        reward = min(score, 1.0) if self._partial and score > ATTEMPT else correct
        return Grade(reward, {"correct": correct, **found}, text, method)


def _tagged(reply: str) -> str | None:
    """What stands between the last <answer> and </answer>, as reasoning-gym's own prompts ask for."""
    _, opened, rest = reply.rpartition("<answer>")
    body, closed, _ = rest.partition("</answer>")
    return body.strip() if opened and closed and len(body) <= 1 << 16 else None
