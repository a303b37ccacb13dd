"""A task that asks other questions when asked again, or is paid wrongly, stops the run and is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.schema import Recipe
from lockstep.errors import HealthStop, TaskError
from lockstep.loops.checks import check_grading, check_purity
from lockstep.tasks.build import build_task
from lockstep.tasks.file import FileRows
from lockstep.track.writer import read_metrics
from lockstep.types import Grade, Prompt
from lockstep.verifiers.exact import Numeric
from tests.loops.runs import NO_EVAL, recipe, trained

TASK = """
import random
from lockstep.types import Grade, Prompt

class Sums:
    name = "sums"
    def __init__(self, how):
        self.how, self.asked = how, 0
    def batch(self, step, size):
        self.asked += 1
        start = step * size
        if self.how == "position":
            start = self.asked * size
        if self.how == "random":
            start = random.randrange(10**9)
        answer = "1" if self.how != "two answers" or step % 2 else "2"
        if self.how == "two answers":
            start = 0
        return [Prompt(f"sums/{n}", ({"role": "user", "content": f"{n % 4 if self.how == 'repeats' else n} + 1 ="},), answer)
                for n in range(start, start + size)]
    def heldout(self, role, size):
        return [Prompt(f"held/{n}", ({"role": "user", "content": f"held out {n}"},), "1") for n in range(size)]
    def grade(self, prompt, reply):
        return 1.0
"""


def task_of(folder: Path, how: str) -> tuple[object, Recipe]:
    (folder / "own.py").write_text(TASK)
    made = Recipe.model_validate(
        {
            "task": {"kind": "python", "path": f"{folder}/own.py:Sums", "settings": {"how": how}},
            "prompts_per_step": 4,
            "steps": 5,
        }
    )
    return build_task(made.task, 0), made


def test_a_pure_task_is_described(tmp_path):
    assert check_purity(*task_of(tmp_path, "pure")) == [
        "task sums: 20 different questions in the first 5 steps, the same when drawn twice"
    ]


def test_repeated_questions_are_counted(tmp_path):
    assert (
        "4 different questions in the first 5 steps, the same when drawn twice; 16 prompts repeat a question under"
        in check_purity(*task_of(tmp_path, "repeats"))[0]
    )


@pytest.mark.parametrize("how", ["position", "random"])
def test_a_task_with_a_position_or_chance_is_refused(tmp_path, how):
    with pytest.raises(
        TaskError,
        match=r"gives different prompts for step .* when its batch is requested again; the first that differs is sums/",
    ):
        check_purity(*task_of(tmp_path, how))


def test_an_id_with_two_answers_is_refused(tmp_path):
    with pytest.raises(TaskError, match="two prompts with different questions or answers have the id sums/0"):
        check_purity(*task_of(tmp_path, "two answers"))


class Lenient:
    """Also pays an answer that begins with the reference."""

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        grade = Numeric("none", 1e-6).grade(prompt, reply)
        return Grade(1.0) if (grade.extracted or "").startswith(prompt.answer) else grade


def test_a_grader_that_changes_stops_the_run_and_the_item_is_named(tmp_path, tiny_model_dir):
    made = recipe(tmp_path, tiny_model_dir, "task.verifier={kind: numeric}")
    task = build_task(made.task, 0)
    assert isinstance(task, FileRows)
    prompts = task.batch(0, 4)
    assert check_grading(task, prompts, 1) == 4
    changed = replace(task, verifier=Lenient())
    wrong = [replace(prompts[0], answer="not a number")]
    with pytest.raises(
        HealthStop, match=f"step 51.*the self-test of the grader failed: {prompts[0].id}: the reference"
    ) as stop:
        check_grading(task, wrong, 51)
    assert "trust no score since the last self-test" in str(stop.value)
    assert (
        changed.problems(prompts[0]) == []
    )  # its kind is not known: only the reference, nothing and garbage are tried


def test_a_run_tests_its_grader_every_so_often(tmp_path, tiny_model_dir):
    verifier = "task.verifier={kind: numeric, fallback: last_number}"
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, verifier, "health.selftest_every=2", "steps=5")
    tested = {row.step for row in read_metrics(run) if "time/selftest" in row.metrics}
    assert tested == {1, 3, 5}
    assert "in the first 5 steps, the same when drawn twice" in run.log_path.read_text()
