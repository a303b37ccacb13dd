"""Grading in the background: in any order the same grades, waiting only where there is nothing else to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.errors import EngineError, TaskError
from lockstep.rollout.grading import AsyncGrader
from lockstep.tasks.build import build_task
from lockstep.tasks.python import UserTask
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import Asked
from tests.workers.test_pool import gone

PROMPTS = [Prompt(f"p/{i}", (), str(i)) for i in range(6)]


class Slow:
    """Takes longer for earlier prompts, in as many threads as it says."""

    def __init__(self, workers: int = 0, seconds: float = 0.0) -> None:
        self.workers, self.seconds, self.threads, self.calls = workers, seconds, set[str](), 0

    def workers_for(self, prompt: Prompt) -> int:
        return self.workers

    def grades_many(self, prompt: Prompt) -> None:
        return None

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


# --- several replies at a time ----------------------------------------------------------------------------------------
OWN = """
import os, time
from pathlib import Path
from lockstep.types import Prompt

class Own:
    name = "own"

    def batch(self, step, size):
        asked = ({"role": "user", "content": "?"},)
        return [Prompt(f"own/{step * size + i}", asked, str((step * size + i) % 5), "own") for i in range(size)]

    def heldout(self, role, size):
        return self.batch(1000, size)

    def grade(self, prompt, reply):
        others = Path(__file__).with_name("others")
        match reply:
            case "throw": raise ValueError("odd reply")
            case "exit": os._exit(3)
            case "hang": time.sleep(1000)
            case "nap": time.sleep(0.01)
            case "last":
                while others.stat().st_size < 400:
                    time.sleep(0.01)
        with others.open("a") as file:
            file.write(".")
        return float(prompt.answer == reply)
"""


def own(folder: Path, seconds: float) -> UserTask:
    (folder / "own.py").write_text(OWN)
    grading = {"seconds": seconds, "workers": 2}
    settings = schema.PythonTask.model_validate({"kind": "python", "path": f"{folder}/own.py:Own", "grading": grading})
    task = build_task(settings, 0)
    assert isinstance(task, UserTask)
    prompts = task.batch(0, 2)
    with AsyncGrader(task) as grading_:  # both processes have started
        for prompt in prompts:
            grading_.submit(prompt.id, prompt, "")
        for prompt in prompts:
            grading_.grade(prompt.id)
    (folder / "others").write_text("")
    return task


def sizes(task: UserTask) -> list[int]:
    """Where the numbers of replies that are sent together are put from now on."""
    taken, together = list[int](), task.verifier.grade_many

    def counted(asked: Sequence[Asked], late: Callable[[], None] = lambda: None) -> Iterator[list[Grade]]:
        taken.append(len(asked))
        return together(asked, late)

    task.verifier.grade_many = counted
    return taken


def test_replies_to_a_grader_that_is_not_fast_are_sent_one_by_one(tmp_path: Path) -> None:
    task = own(tmp_path, 60)
    taken = sizes(task)
    with AsyncGrader(task) as grading:
        for prompt in task.batch(1, 40):
            grading.submit(prompt.id, prompt, "nap")
        while grading.open:
            grading.done(1.0)
    assert taken == [1] * 40
    task.verifier.pool.close()


def test_replies_that_are_sent_together_have_the_grades_of_replies_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.rollout.grading.FAST_SECONDS", 1.0)  # on a busy machine, too
    task = own(tmp_path, 2)
    taken = sizes(task)
    replies = ["0", "1", "2"] * 60
    replies[70], replies[71], replies[100], replies[140] = "exit", "throw", "hang", "exit"
    prompts = task.batch(1, len(replies))
    with AsyncGrader(task) as grading:
        for prompt, reply in zip(prompts, replies, strict=True):
            grading.submit(prompt.id, prompt, reply)
        done: list[str] = []
        while grading.open:
            done += grading.done(1.0)
        assert sorted(done) == sorted(prompt.id for prompt in prompts)
        grades = [grading.grade(prompt.id) for prompt in prompts]
        assert grading.metrics["time/grade_slowest"] >= 2
    alone = [task.grade(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
    assert grades == alone
    assert [at for at, grade in enumerate(grades) if not grade.scored] == [70, 71, 100, 140]
    assert 1 < max(taken) <= 16
    task.verifier.pool.close()


def test_no_reply_waits_for_a_slow_one_that_was_sent_with_it(tmp_path: Path) -> None:
    task = own(tmp_path, 60)
    prompts = task.batch(1, 401)
    with AsyncGrader(task) as grading:
        for at, prompt in enumerate(prompts):
            grading.submit(prompt.id, prompt, "last" if at == 300 else "0")
        assert all(grading.grade(prompt.id).scored for prompt in prompts)
    task.verifier.pool.close()


def test_leaving_during_a_batch_leaves_no_process(tmp_path: Path) -> None:
    task = own(tmp_path, 60)
    prompts = task.batch(1, 400)
    with AsyncGrader(task) as grading:
        for prompt in prompts:
            grading.submit(prompt.id, prompt, "0")
        while not grading.done(1.0):
            pass
    assert (tmp_path / "others").stat().st_size < len(prompts)
    assert task.grade(prompts[0], "0").reward == 1.0
    pids = task.verifier.pool.pids
    task.verifier.pool.close()
    assert gone(pids)
