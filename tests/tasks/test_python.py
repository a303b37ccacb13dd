from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task
from lockstep.types import Grade

GOOD = """
from lockstep.types import Grade, Prompt

class Doubling:
    name = "doubling"

    def __init__(self, top=100, seed=0):
        self.top, self.seed = top, seed

    def ask(self, n):
        return Prompt(f"double/{n}", ({"role": "user", "content": f"2 * {n} ="},), str(2 * n), self.name)

    def batch(self, step, size):
        return [self.ask((self.seed + step * size + i) % self.top) for i in range(size)]

    def heldout(self, role, size):
        return [self.ask(self.top + i) for i in range(size)]

    def grade(self, prompt, reply):
        return Grade(float(prompt.answer == reply.strip()), {"correct": float(prompt.answer == reply.strip())})
"""


def build(tmp_path: Path, code: str, seed: int = 0, **settings: schema.Json) -> BuiltTask:
    file = tmp_path / "mine.py"
    file.write_text(code, encoding="utf-8")
    return build_task(schema.PythonTask(path=f"{file}:Doubling", settings=settings), seed)


def test_a_task_of_ones_own(tmp_path):
    task = build(tmp_path, GOOD, seed=5)
    assert task.name == "doubling"
    assert [p.answer for p in task.batch(1, 4)] == ["18", "20", "22", "24"]  # from seed 5
    assert [p.answer for p in build(tmp_path, GOOD, seed=5, top=7).batch(0, 3)] == ["10", "12", "0"]
    assert task.heldout("id_probe", 2)[1].answer == "202"
    prompt = task.batch(0, 1)[0]
    assert task.grade(prompt, "10") == Grade(1.0, {"correct": 1.0})


def test_the_settings_win_over_the_runs_seed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    task = build_task(schema.PythonTask(path=f"{file}:Doubling", settings={"seed": 1}), 5)
    assert task.batch(0, 1)[0].answer == "2"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class Doubling", "class Doublings", "did you mean Doublings?"),
        ('name = "doubling"', "pass", "the task has no name"),
        (
            "def heldout",
            "def held_out",
            "the task's class has no method heldout\n  to fix: define heldout(self, role, size)",
        ),
        (
            "def batch(self, step, size)",
            "def batch(self, step)",
            "the function takes (step), but is called with 2 positional arguments",
        ),
        ("def grade(self, prompt, reply)", "async def grade(self, prompt, reply)", "the function is async"),
        (
            "self.top, self.seed = top, seed",
            "raise ValueError('no')",
            "the call with the settings {'seed': 0} failed: ValueError: no",
        ),
        (
            "self.top, self.seed = top, seed",
            "raise SystemExit(0)",
            "the call with the settings {'seed': 0} failed: SystemExit: 0",
        ),
        ("class Doubling:", "def Doubling():", "the path names an object of type function, not a class"),
    ],
)
def test_refused_when_it_is_built(tmp_path, old, new, message):
    with pytest.raises(TaskError) as error:
        build(tmp_path, GOOD.replace(old, new))
    assert message in str(error.value)
    assert "mine.py" in str(error.value)


def test_unknown_settings_are_refused(tmp_path):
    with pytest.raises(TaskError, match="unexpected keyword argument 'bottom'"):
        build(tmp_path, GOOD, bottom=3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [self.ask(0)] * size", "two of the prompts have the same id"),
        ("return [self.ask(0)]", "the task returned 1 prompts, but 3 were requested\n  to fix: return 3 prompts"),
        ("return ['2 * 2 ='] * size", "the task returned an object of type str"),
        ("raise SystemExit(0)", "the task's method failed: SystemExit: 0"),
        ("return None", "TypeError: 'NoneType' object is not iterable"),
        ("return [self.ask(i / 0) for i in range(size)]", "ZeroDivisionError: division by zero ({file}:14)"),
        ("yield self.ask(1)\n        raise KeyError('gone')", "KeyError: 'gone'"),
        (
            "return [Prompt(f'd/{i}', '2 * 2 =', '4', 'd') for i in range(size)]",
            "the messages of prompt d/0 are not turns",
        ),
        (
            "return [Prompt(f'd/{i}', ({'role': 'user', 'content': i},), '4', 'd') for i in range(size)]",
            "the messages of prompt d/0 are not turns",
        ),
        (
            "return [Prompt(f'd/{i}', ({'role': 'user', 'content': f'{i} ='},), i, 'd') for i in range(size)]",
            "the answer of prompt d/0 is of type int, not text\n  to fix: return answer=str(...)",
        ),
        (
            "return [Prompt(i, ({'role': 'user', 'content': f'{i} ='},), '4', 'd') for i in range(size)]",
            "the id of prompt 0 is of type int, not text\n  to fix: return id=str(...)",
        ),
        (
            "return [Prompt([i], ({'role': 'user', 'content': f'{i} ='},), '4', 'd') for i in range(size)]",
            "the id of prompt [0] is of type list, not text",
        ),
    ],
)
def test_what_batch_gives_is_checked(tmp_path, body, message):
    task = build(tmp_path, GOOD.replace("return [self.ask((self.seed", f"{body}\n        return [self.ask((self.seed"))
    with pytest.raises(TaskError) as error:
        task.batch(0, 3)
    assert message.format(file=tmp_path / "mine.py") in str(error.value)
    assert "batch(0, 3)" in str(error.value)


def test_held_out_questions_in_training_are_refused(tmp_path):
    code = GOOD.replace("self.ask(self.top + i)", "self.ask(i)")
    task = build(tmp_path, code)
    task.heldout("id_probe", 3)
    with pytest.raises(TaskError, match="the question double/0 is also held out, as double/0"):
        task.batch(0, 3)
    task = build(tmp_path, code)
    task.batch(0, 3)
    with pytest.raises(TaskError, match="the question double/0 is also trained on, as double/0"):
        task.heldout("id_probe", 3)


def test_mistakes_in_grade_are_unscored(tmp_path):
    task = build(tmp_path, GOOD.replace("return Grade(", "return Missing("))
    grade = task.grade(task.batch(0, 1)[0], "1")
    assert grade.reward is None
    assert grade.error == f"NameError: name 'Missing' is not defined ({tmp_path}/mine.py:20)"


def test_the_documents_example_works(tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    code = next(block for block in document.split("```python\n")[1:] if "class Doubling" in block).split("```")[0]
    task = build(tmp_path, code, top=100)
    prompt = task.batch(0, 2)[1]
    assert task.grade(prompt, " 2 ").reward == 1.0
    assert task.grade(prompt, "3").reward == 0.0
