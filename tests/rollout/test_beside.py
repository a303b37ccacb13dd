"""Grading beside an engine: the grades that the task itself would give, from processes of the engine's own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.rollout.beside import BesideEngine
from lockstep.rollout.grading import AsyncGrader
from lockstep.tasks.build import build_grader, build_task
from lockstep.tasks.mixed import Mixed
from lockstep.types import Completion, FinishReason, Grade, Prompt, Request, Sampling, TokenIds
from lockstep.workers.wire import dumps, loads

Graded: TypeAlias = tuple[Grade, float, float]

OWN = """
import os
from lockstep.types import Grade, Prompt

class Count:
    name = "count"
    def __init__(self, seed, least=1):
        self.seed, self.least = seed, least
    def batch(self, step, size):
        return [Prompt(f"q{step}-{i}", ({"role": "user", "content": f"{step} {i}"},), "", "count") for i in range(size)]
    def heldout(self, role, size):
        return [Prompt(f"h{i}", ({"role": "user", "content": f"h {i}"},), "", "count") for i in range(size)]
    def grade(self, prompt, reply):
        if reply == "hang":
            while True:
                pass
        return Grade(float(len(reply) >= self.least), {"seed": self.seed, "parent": os.getppid()}, prompt.id + prompt.task)
"""
SUMS = {"kind": "reasoning_gym", "dataset": "chain_sum", "settings": {"max_terms": 2}}


def settings_of(task: dict[str, object]) -> schema.Task:
    return schema.Recipe.model_validate({"model": {"path": "m"}, "task": task}).task


@pytest.fixture
def own(tmp_path: Path) -> dict[str, object]:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return {
        "kind": "python",
        "path": f"{file}:Count",
        "settings": {"least": 3},
        "grading": {"seconds": 1, "workers": 3},
    }


def read_many(many: Sequence[TokenIds]) -> list[tuple[str, str]]:
    """Stand for a tokenizer: ids are characters."""
    return [(text := bytes(ids).decode(), text) for ids in many]


def completion(prompt: Prompt, text: str, asked: Prompt | None) -> Completion:
    graded = "" if asked is None else dumps(asked).decode()
    request = Request(f"{prompt.id}#{text}", (1,), prompt.id, 0, Sampling(9), 0, graded=graded)
    ids = tuple(text.encode())
    return Completion(request, ids, (-1.0,) * len(ids), FinishReason.STOP, 0)


def all_of(engine: BesideEngine, found: Sequence[Completion], seconds: float = 20.0) -> dict[str, Graded | None]:
    """Return the grades of these completions by id, None for those that get none; each is returned at once, as it was read."""
    first = engine.take(found, 0.0, 32)
    assert [one.request_id for one in first.replies] == [one.request.id for one in found]
    assert all(reply.read == read_many([one.ids])[0] for reply, one in zip(first.replies, found, strict=True))
    grades, end = first.grades, time.monotonic() + seconds
    while engine.waiting and time.monotonic() < end:
        later = engine.take([], time.monotonic() + 0.2, 32)
        assert later.replies == []
        grades += later.grades
    return dict.fromkeys(one.request.id for one in found) | {one.request_id: one.graded for one in grades}


@pytest.mark.parametrize("kind", ["own", "sums", "mixed", "nothing"])
def test_grades_are_those_of_the_task(own: dict[str, object], kind: str) -> None:
    tasks: dict[str, dict[str, object]] = {"own": own, "sums": SUMS, "nothing": {"kind": "guess_number"}}
    tasks["mixed"] = {
        "kind": "mixed",
        "tasks": {name: {"weight": 1, "task": tasks[name]} for name in ("own", "sums", "nothing")},
    }
    settings = settings_of(tasks[kind])
    task = build_task(settings, seed=7)
    engine = BesideEngine(lambda: build_grader(settings, 7, 2), read_many)
    prompts = task.batch(0, 6)
    given = [completion(one, text, task.apart(one)) for one in prompts for text in ("no", "4", right(one))]
    found = all_of(engine, given)
    apart = {one.id for one in prompts if task.apart(one) is not None}
    expected = {"own": 6, "sums": 6, "mixed": 4, "nothing": 0}
    assert len(apart) == expected[kind]
    for one in prompts:
        for text in ("no", "4", right(one)):
            graded = found[f"{one.id}#{text}"]
            assert (graded is not None) == (one.id in apart)
            if graded is not None:
                assert comparable(graded[0]) == comparable(task.grade(one, text))
                assert graded[0].scored
    rewards = {graded[0].reward for graded in found.values() if graded}
    assert rewards == ({0.0, 1.0} if apart else set())
    if isinstance(task, Mixed):
        assert {graded[0].extracted for graded in found.values() if graded} >= {"q0-0count"}


def right(prompt: Prompt) -> str:
    """Return a right reply to a prompt of either task."""
    return f"\\boxed{{{prompt.answer}}}" if prompt.answer else "three"


def comparable(grade: Grade) -> tuple[object, ...]:
    """Return all of a grade but which process's child gave it."""
    metrics = {name: value for name, value in grade.metrics.items() if name != "parent"}
    return grade.reward, metrics, grade.extracted, grade.method, grade.error, grade.facts


def test_processes_are_the_engines_own_and_a_reply_that_hangs_holds_up_no_other(own: dict[str, object]) -> None:
    settings = settings_of(own)
    task = build_task(settings, seed=7)
    built = []

    def build():  # type: ignore[no-untyped-def]
        built.append(build_grader(settings, 7, 2))
        return built[-1]

    engine = BesideEngine(build, read_many)
    (prompt,) = task.batch(0, 1)
    assert all_of(engine, [completion(prompt, "free", None)])[f"{prompt.id}#free"] is None
    assert built == []
    texts = ["hang", *map(str, range(1000, 1020))]
    first = engine.take([completion(prompt, text, task.apart(prompt)) for text in texts], 0.0, 99).grades
    while len(first) < 20:
        first += engine.take([], time.monotonic() + 5, 20 - len(first)).grades
    assert engine.waiting == 1
    grades = [one.graded[0] for one in first]
    assert {(grade.reward, grade.metrics["parent"]) for grade in grades} == {(1.0, float(os.getpid()))}
    ((_, last),) = all_of(engine, []).items()
    assert last is not None
    assert "time limit" in str(last[0].error)
    assert last[1] > 0.5
    assert last[2] > 0.3
    assert len(built) == 1
    assert built[0].workers == 2


def test_a_users_file_runs_in_the_processes_that_grade_alone(own: dict[str, object], tmp_path: Path) -> None:
    """It may change a process: the number of its threads, for example, which decides the order of sums."""
    ran = tmp_path / "ran.txt"
    (tmp_path / "own.py").write_text(f"import os\nopen({str(ran)!r}, 'a').write(f'{{os.getpid()}} ')\n{OWN}")
    made = build_grader(settings_of(own), 7, 1)
    assert made.grade(Prompt("q", (), "", "count"), "three").metrics["seed"] == 7
    assert str(os.getpid()) not in ran.read_text().split()


@pytest.mark.parametrize(("places", "workers"), [(1, 9), (4, 3)])
def test_engines_share_the_processes_of_every_part_of_a_composite(places: int, workers: int) -> None:
    parts = [{"name": f"part_{most}", "verifier": {"kind": "math", "workers": most}} for most in (9, 2)]
    settings = settings_of({**SUMS, "verifier": {"kind": "composite", "parts": parts}})
    assert build_grader(settings, 7, places).workers == workers


def test_what_is_dropped_does_not_come_back(own: dict[str, object]) -> None:
    settings = settings_of(own)
    task = build_task(settings, seed=7)
    engine = BesideEngine(lambda: build_grader(settings, 7, 1), read_many)
    prompts = task.batch(0, 2)
    engine.take([completion(prompts[0], text, task.apart(prompts[0])) for text in ("hang", "a", "b")], 0.0, 9)
    engine.drop()
    found = all_of(engine, [completion(prompts[1], "after", task.apart(prompts[1]))])
    assert list(found) == [f"{prompts[1].id}#after"]


def test_a_grader_that_cannot_be_loaded_is_an_error_of_its_own(own: dict[str, object], tmp_path: Path) -> None:
    settings = settings_of(own)
    task = build_task(settings, seed=7)
    (prompt,) = task.batch(0, 1)
    (tmp_path / "own.py").unlink()
    engine = BesideEngine(lambda: build_grader(settings, 7, 1), read_many)
    with pytest.raises(TaskError, match=r"own\.py"):
        engine.take([completion(prompt, "a", task.apart(prompt))], 0.0, 2)


def test_a_prompt_that_cannot_be_sent_is_graded_by_the_driver(own: dict[str, object]) -> None:
    task = build_task(settings_of(own), seed=7)
    (prompt,) = task.batch(0, 1)
    strange = replace(prompt, id="strange", data={"made": object()})
    assert AsyncGrader(task).question(prompt) == ""
    grader = AsyncGrader(task, beside=True)
    assert loads(grader.question(prompt).encode()) == prompt
    assert grader.question(strange) == ""
    assert grader.noted(Grade(1.0), 2.5, 0.5) == Grade(1.0)
    assert grader.metrics == {"time/grade_work": 2.5, "time/grade_slowest": 2.5}
    assert grader.held == 0.5


def test_replies_that_never_stop_coming_are_graded_all_the_same(own: dict[str, object]) -> None:
    settings = settings_of(own)
    task = build_task(settings, seed=7)
    engine = BesideEngine(lambda: build_grader(settings, 7, 1), read_many)
    (prompt,) = task.batch(0, 1)
    graded, end, number = 0, time.monotonic() + 20, 0
    while not graded and time.monotonic() < end:
        number += 1
        graded += len(engine.take([completion(prompt, str(number), task.apart(prompt))], 0.0, 1).grades)
        time.sleep(0.001)
    assert graded
    assert number > 10
    engine.drop()
