"""A task of one's own is graded in processes: whatever its `grade` does costs that sample alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config import schema
from lockstep.config.load import load
from lockstep.errors import HealthStop, TaskError
from lockstep.loops.start import start_run
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from lockstep.types import Grade
from tests.loops.runs import NO_EVAL, events, words

CODE = '''
import os, sys, time
from pathlib import Path
from lockstep.types import Grade, Prompt

class Mine:
    name = "mine"

    def __init__(self, seed=0, data=None, once=""):
        self.data, self.asked = data or {}, 0
        if once:  # may be made only once
            if Path(once).exists():
                raise RuntimeError("the licence allows one object")
            Path(once).write_text("taken")

    def ask(self, n):
        return Prompt(f"mine/{n}", ({"role": "user", "content": f"State {n} ="},), str(n), self.name, self.data)

    def batch(self, step, size):
        self.asked += size
        return [self.ask(step * size + i) for i in range(size)]

    def heldout(self, role, size):
        return [self.ask(100000 + i) for i in range(size)]

    def grade(self, prompt, reply):
        match reply:
            case "throw": raise ValueError("odd reply")
            case "hang": time.sleep(1000)
            case "spin":
                while True: pass
            case "text": return "1"
            case "none": return None
            case "inf": return float("inf")
            case "list": return [1.0, 0.0]
            case "fork": os.fork()
            case "eat": return len(bytearray(10 * 2**30))
            case "exit": os._exit(3)
            case "asked": return float(self.asked)
        return float(prompt.answer == reply)

class Rare(Mine):
    """Fails on one prompt in forty of a step."""

    def grade(self, prompt, reply):
        if reply and "boxed" not in reply and "qwerty" not in reply and int(prompt.answer) % 40 == 7:
            return None
        return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2

class Often(Mine):
    def grade(self, prompt, reply):
        if reply and "boxed" not in reply and "qwerty" not in reply and int(prompt.answer) % 4 == 1:
            time.sleep(1000)
        return 1.0

class Unable(Mine):
    def grade(self, prompt, reply):
        return {}[reply]

class OnlyHere(Mine):
    def __init__(self, seed=0):
        if "lockstep.workers.worker" in sys.modules or "worker" in " ".join(sys.orig_argv):
            raise RuntimeError("no display")
        super().__init__(seed)

class Strange(Mine):
    def ask(self, n):
        prompt = super().ask(n)
        return Prompt(prompt.id, prompt.messages, prompt.answer, "mine", {"rows": [{"unit": object()}]})
'''
STOPS = "health.max_unscored=0.05"
UNSCORED = {
    "throw": "ValueError: odd reply (",
    "hang": "the grader met its time limit: no answer in 1 s",
    "spin": "the grader met its time limit: no answer in 1 s",
    "text": "the grader returned str, not a number, bool or Grade",
    "none": "the grader returned NoneType, not a number, bool or Grade",
    "inf": "the grader returned inf, not a finite number",
    "list": "the grader returned list, not a number, bool or Grade",
    "fork": "StartsProcessError: the code tried to start a process (os.fork)",
    "eat": "the grader met its memory limit: MemoryError",
    "exit": "the grader did not live: its process ended (exit code 3)",
}


def settings_of(folder: Path, name: str = "Mine", **settings: Any) -> dict[str, Any]:
    (folder / "own.py").write_text(CODE)
    grading = {"seconds": 1.0, "memory_gib": 0.5, "workers": 1}
    return {"kind": "python", "path": f"{folder}/own.py:{name}", "settings": settings, "grading": grading}


def built(folder: Path, name: str = "Mine", **settings: Any) -> BuiltTask:
    return build_task(schema.PythonTask.model_validate(settings_of(folder, name, **settings)), 0)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> BuiltTask:
    return built(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("reply", UNSCORED)
def test_what_goes_wrong_is_unscored_and_the_next_reply_is_right(task: BuiltTask, reply: str) -> None:
    (prompt,) = task.batch(0, 1)
    start = time.monotonic()
    grade = task.grade(prompt, reply)
    assert time.monotonic() - start < 20
    assert grade.reward is None
    assert (grade.error or "").startswith(UNSCORED[reply])
    assert task.grade(prompt, prompt.answer) == Grade(1.0, {"correct": 1.0})


def test_it_is_graded_by_another_object_of_the_class(task: BuiltTask) -> None:
    (prompt,) = task.batch(5, 1)
    assert task.grade(prompt, "asked").reward == 0.0  # what batch counted is in the run's own object
    assert task.workers == 1


def test_a_class_that_cannot_be_made_where_it_grades_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the licence allows one object") as error:
        built(tmp_path, once=str(tmp_path / "taken"))
    assert f"{tmp_path}/own.py:Mine" in str(error.value)
    with pytest.raises(TaskError, match=r"the call with the settings .* failed: RuntimeError: no display"):
        built(tmp_path, "OnlyHere")


def test_prompts_that_cannot_be_sent_there_are_refused_and_named(tmp_path: Path) -> None:
    task = built(tmp_path, "Strange")
    with pytest.raises(TaskError, match=r"the prompt mine/4 cannot be sent .*data.rows\[0\].unit is a object"):
        task.batch(2, 2)


def run_of(folder: Path, model: Path, name: str, *overrides: str) -> RunDirectory:
    (path, *_) = words(folder, model)
    content = yaml.safe_load(Path(path).read_text()) | {"task": settings_of(folder, name)}
    Path(path).write_text(yaml.safe_dump(content))
    return start_run(load([path, NO_EVAL, *overrides]))


def test_a_run_names_and_counts_the_sample_and_warns(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = run_of(
        tmp_path, tiny_model_dir, "Rare", "steps=1", "prompts_per_step=40", "samples_per_prompt=2", "rollout.slots=40"
    )
    (row,) = [row for row in read_metrics(run) if row.step == 1]
    assert row.metrics["reward/unscored"] == 2 / 80
    (warning,) = [text for text in events(run, "warning") if "could not be scored" in text]
    assert "2 replies (2.5%) could not be scored; the first, mine/7: the grader returned NoneType" in warning


def test_a_run_stops_when_grading_hangs_too_often(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(HealthStop, match=r"2 replies \(25.0%\).* the first, mine/1: the grader met its time limit"):
        run_of(
            tmp_path,
            tiny_model_dir,
            "Often",
            "steps=1",
            "prompts_per_step=4",
            "samples_per_prompt=2",
            STOPS,
            "health.garbage=off",
        )


def test_a_grader_that_scores_nothing_stops_before_anything_is_sampled(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(HealthStop, match=r"self-test of the grader failed: mine/0: .* cannot be scored: KeyError"):
        run_of(tmp_path, tiny_model_dir, "Unable", "steps=1")
