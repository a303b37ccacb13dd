"""Rubrics and tasks of the package verifiers, in Pythons that have it: graded here, and trained on."""

from __future__ import annotations

import importlib.util
import json
import site
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.verifiers.rubric import VerifiersRubric
from tests.pythons import python_with

CLASSIC = Path(__file__).parent / "rewards" / "rubrics.py"
ROOT = Path(__file__).parents[2]
TASK = ROOT / "recipes" / "envs" / "digit_sums.py"
GRADED = """
import json, sys
from lockstep.config import schema
from lockstep.types import Prompt, ReplyText
from lockstep.verifiers.base import grade_replies
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.selftest import oddities, self_test

settings, replies = json.loads(sys.argv[1])
grader = build_verifier(schema.RubricVerifier.model_validate({"workers": 1, **settings}))
prompt = Prompt("t/1", ({"role": "user", "content": "4 + 3 ="},), "7", "t", {"info": '{"level": 3}'})
grades = grade_replies(grader, prompt, [ReplyText.probe(reply) for reply in replies])
tested = self_test(grader, prompt) + oddities(grader, prompt) if len(sys.argv) > 2 else []
print(json.dumps([[[grade.reward, grade.error, dict(grade.metrics)] for grade in grades], tested]))
"""


def python_behind(folder: Path, package: str) -> str:
    """Make a Python that has a package, and behind it what this one has."""
    python = python_with(folder, package)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "zz_behind.pth").write_text("\n".join([str(ROOT), *site.getsitepackages()]))
    return python


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_behind(tmp_path_factory.mktemp("classic"), "verifiers>=0.3,<0.4")


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_behind(tmp_path_factory.mktemp("v1"), "verifiers>=0.4,<0.5")


def ran(python: str, *arguments: str) -> str:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def graded(python: str, path: str, *replies: str, test: bool = False, **settings: Any) -> tuple[list[Any], list[str]]:
    words = [json.dumps([{"path": path, **settings}, replies]), *(["test"] if test else [])]
    grades, tested = json.loads(ran(python, "-c", GRADED, *words).splitlines()[-1])
    return grades, tested


RIGHT = "<think>a</think>\n<answer>7</answer>"


@pytest.mark.slow
def test_a_rubric_is_summed_by_weight_and_each_function_is_a_metric(classic: str, tmp_path: Path) -> None:
    grades, tested = graded(classic, f"{CLASSIC}:rubric", RIGHT, "x" * 99, test=True)
    assert tested == []
    assert grades == [
        [1.5, None, {"correct": 1.0, "correct_answer": 1.0, "short": 1.0, "level": 4.0}],
        [0.0, None, {"correct": 0.0, "correct_answer": 0.0, "short": 0.0, "level": 4.0}],
    ]
    grades, _ = graded(classic, f"{CLASSIC}:load_environment", RIGHT, settings={"bonus": 0.25})
    assert [grade[0] for grade in grades] == [1.25]
    page = (ROOT / "docs" / "coming_from_rewards.md").read_text(encoding="utf-8").partition("\n## verifiers\n")[2]
    (tmp_path / "rubric.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    grades, _ = graded(classic, f"{tmp_path}/rubric.py:rubric", RIGHT, "x" * 999)
    assert [grade[0] for grade in grades] == [1.2, 0.0]
    grades, _ = graded(classic, f"{CLASSIC}:group", RIGHT, "x" * 99)  # a function that compares the group
    assert [grade[0] for grade in grades] == [1.0, 0.25]


@pytest.mark.slow
def test_a_function_that_fails_leaves_its_reply_unscored_where_the_package_counts_a_0(classic: str) -> None:
    grades, tested = graded(classic, f"{CLASSIC}:broken", RIGHT, "nothing", test=True)
    assert [grade[0] for grade in grades] == [2.0, None]
    assert grades[1][1] == "breaks failed: ZeroDivisionError: division by zero"
    assert "an empty reply cannot be scored: breaks failed" in tested[0]  # so a run is refused at the start
    grades, _ = graded(classic, f"{CLASSIC}:empty", "a")
    assert grades == [[None, "gives_none returned None, not a finite number", {}]]
    grades, _ = graded(classic, f"{CLASSIC}:slow", "hang", "b", seconds=2)
    assert [grade[0] for grade in grades] == [None, None]
    assert "time limit" in grades[0][1]


@pytest.mark.slow
def test_a_task_of_v1_grades_by_its_marked_methods(v1: str, tmp_path: Path) -> None:
    grades, tested = graded(v1, f"{TASK}:SumTask", "7", "it is 8, as everyone knows", test=True)
    assert grades == [
        [1.25, None, {"correct": 1.0, "right": 1.0, "short": 1.0, "letters": 1.0}],
        [0.0, None, {"correct": 0.0, "right": 0.0, "short": 0.0, "letters": 26.0}],
    ]
    assert tested == []
    own = tmp_path / "own.py"
    own.write_text(
        "import verifiers.v1 as vf\n"
        "class Bare(vf.Task[vf.TaskData]):\n    pass\n"
        "class Runs(vf.Task[vf.TaskData]):\n    @vf.reward\n    async def ran(self, runtime):\n        return 1.0\n"
        "class Fails(vf.Task[vf.TaskData]):\n    @vf.reward\n    async def failed(self, trace):\n"
        "        return float(trace.last_reply)\n"
    )
    grades, _ = graded(v1, f"{own}:Fails", "0.5", "no")
    assert [grade[0] for grade in grades] == [0.5, None]
    assert "could not convert string to float" in grades[1][1]
    for name, why in (
        ("Bare", "the vf.Task has no reward method"),
        ("Runs", "ran needs the environment's runtime"),
        ("vf", "neither a vf.Rubric nor"),
    ):
        with pytest.raises(AssertionError, match=why):
            graded(v1, f"{own}:{name}", "0.5")


@pytest.mark.slow
def test_a_run_trains_on_it(v1: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(f"""
name: rubric
runs_dir: {tmp_path}/runs
steps: 1
prompts_per_step: 2
samples_per_prompt: 3
model: {{path: {tiny_model_dir}, dtype: fp32}}
task:
  kind: file
  data: {tmp_path}/rows.jsonl
  heldout_rows: 4
  near_overlap: allow
  verifier: {{kind: verifiers, path: "{TASK}:SumTask", workers: 1}}
rollout: {{max_tokens: 16, slots: 8}}
eval: {{enabled: false}}
""")
    ran(v1, "-m", "lockstep", "train", str(tmp_path / "recipe.yaml"))
    lines = [json.loads(line) for line in (tmp_path / "runs/rubric/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["metrics"]["answer/letters"] > 0
    assert lines[0]["metrics"]["reward/unscored"] == 0


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed here")
def test_without_the_package_the_command_is_named() -> None:
    with pytest.raises(TaskError, match="the package verifiers is not installed") as refused:
        VerifiersRubric(schema.RubricVerifier(path=f"{CLASSIC}:rubric", workers=1))
    assert "pip install verifiers" in str(refused.value)
