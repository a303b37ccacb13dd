"""Grading in the background: in any order the same grades, waiting only where there is nothing else to do."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.errors import EngineError, TaskError
from lockstep.rollout.grading import AsyncGrader
from lockstep.types import Grade, Prompt

PROMPTS = [Prompt(f"p/{i}", (), str(i)) for i in range(6)]


class Slow:
    """Takes longer for earlier prompts, in as many threads as it says."""

    def __init__(self, workers: int = 0, seconds: float = 0.0) -> None:
        self.workers, self.seconds, self.threads, self.calls = workers, seconds, set[str](), 0

    def workers_for(self, prompt: Prompt) -> int:
        return self.workers

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        self.threads.add(threading.current_thread().name)
        self.calls += 1
        time.sleep(self.seconds * (6 - int(prompt.answer)))
        if reply == "raise":
            raise ZeroDivisionError("odd")
        if reply == "broken":
            raise TaskError("no process can be started")
        return Grade(float(prompt.answer == reply))


class Half(Slow):
    """Grades even prompts elsewhere, odd ones here."""

    def workers_for(self, prompt: Prompt) -> int:
        return self.workers if int(prompt.answer) % 2 == 0 else 0


def test_grades_are_those_of_their_replies_in_whatever_order_they_come() -> None:
    with AsyncGrader(Slow(workers=3, seconds=0.02)) as grading:
        for prompt in PROMPTS:
            grading.submit(prompt.id, prompt, "4")
        assert grading.held < 0.02 * 21
        done: list[str] = []
        while grading.open:
            done += grading.done(1.0)
        assert sorted(done) == [prompt.id for prompt in PROMPTS]
        assert [grading.grade(prompt.id).reward for prompt in PROMPTS] == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        assert grading.done(1.0) == []  # nothing is to come, so nothing is waited for
        assert grading.metrics["time/grade_work"] >= 0.02 * 21
        assert 0.12 <= grading.metrics["time/grade_slowest"] < grading.metrics["time/grade_work"]
        assert grading.held > 0.1


def test_a_grader_of_this_process_grades_at_once_and_that_is_counted() -> None:
    grader = Slow(seconds=0.005)
    with AsyncGrader(grader) as grading:
        grading.submit("a", PROMPTS[0], "0")
        assert grading.held >= 0.03
        assert grading.done() == ["a"]
        assert grading.grade("a").reward == 1.0
    assert grader.threads == {threading.current_thread().name}


def test_a_mix_grades_each_prompt_as_its_task_does() -> None:
    grader = Half(workers=2)
    with AsyncGrader(grader) as grading:
        grading.submit("odd", PROMPTS[1], "1")
        assert grader.threads == {threading.current_thread().name}
        grading.submit("even", PROMPTS[2], "2")
        assert grading.grade("even").reward == 1.0
        assert len(grader.threads) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_mistakes_of_a_grader_are_unscored_and_what_it_says_on_purpose_is_raised(workers: int) -> None:
    with AsyncGrader(Slow(workers)) as grading:
        grading.submit("a", PROMPTS[5], "raise")
        assert grading.grade("a").error == "the verifier raised ZeroDivisionError: odd"
        with pytest.raises(EngineError, match="returned this reply twice"):
            grading.submit("a", PROMPTS[5], "5")
        with pytest.raises(TaskError, match="no process"):  # noqa: PT012 - here it is raised at once, there when it is read
            grading.submit("b", PROMPTS[5], "broken")
            grading.grade("b")


def test_leaving_drops_what_was_not_graded() -> None:
    grader = Slow(workers=1, seconds=0.05)
    with AsyncGrader(grader) as grading:
        for prompt in PROMPTS:
            grading.submit(prompt.id, prompt, "4")
    assert grader.calls < len(PROMPTS)  # one was under way
