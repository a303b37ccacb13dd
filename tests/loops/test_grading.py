"""Grading while the engine samples: the same groups with any number of workers, and little of a step's time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.build.build import build_parts, build_task_of
from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.errors import HealthStop
from lockstep.loops.rollouts import check_scored, sample_groups
from lockstep.run.logger import Clock
from lockstep.tasks.base import BuiltTask
from lockstep.track.writer import read_metrics
from lockstep.types import Grade, Group, Prompt
from tests.loops.runs import NO_EVAL, events, recipe, trained

OWN = """
import os, time

def slow(prompt, reply):
    time.sleep(0.02)
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2

def sometimes(prompt, reply):
    n = sum(reply.encode("utf-8", "surrogatepass"))
    if "State" in prompt.messages[-1]["content"] and reply and "boxed" not in reply and "qwerty" not in reply:
        if n % 5 == 0: raise ValueError("odd reply")
        if n % 5 == 1: return "one"
        if n % 5 == 2: os._exit(1)
    return 1.0
"""


def built(folder: Path, model: Path, function: str, *overrides: str) -> tuple[Parts, Recipe]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(OWN)
    made = recipe(
        folder, model, f"task.verifier.path={folder}/own.py:{function}", "task.verifier.workers=2", *overrides
    )
    return build_parts(made, build_task_of(made)), made


def groups_of(parts: Parts, made: Recipe, clock: Clock | None = None) -> list[Group]:
    """The graded groups of the first step."""
    parts.sync.push(parts.learner, parts.engine)
    prompts = list(parts.task.batch(0, made.prompts_per_step))
    return sample_groups(parts, made, prompts, 0, clock or Clock())


def test_grades_do_not_depend_on_the_workers(tmp_path: Path, tiny_model_dir: Path) -> None:
    found = []
    for workers in (1, 4):
        parts, made = built(tmp_path, tiny_model_dir, "slow", f"task.verifier.workers={workers}", "rollout.slots=2")
        found.append(groups_of(parts, made))
    assert found[0] == found[1]
    assert len({rollout.grade.reward for group in found[0] for rollout in group.rollouts}) > 1


def test_slow_graders_do_not_hold_up_sampling(tmp_path: Path, tiny_model_dir: Path) -> None:
    parts, made = built(tmp_path, tiny_model_dir, "slow", "task.verifier.workers=4", "samples_per_prompt=8")
    clock = Clock()
    groups = groups_of(parts, made, clock)
    replies = sum(len(group.rollouts) for group in groups)
    assert clock.seconds["time/grade_work"] > 0.02 * replies  # 20 ms each
    assert clock.seconds["time/grade"] < clock.seconds["time/grade_work"]
    assert clock.seconds["time/grade_slowest"] >= 0.02


class Raising(BuiltTask):
    name = "raising"

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        raise ZeroDivisionError(prompt.id)

    def batch(self, step: int, size: int) -> list[Prompt]:
        return []

    def heldout(self, role: str, size: int) -> list[Prompt]:
        return []


def test_a_verifier_that_raises_leaves_the_reply_unscored(tmp_path: Path, tiny_model_dir: Path) -> None:
    parts, made = built(tmp_path, tiny_model_dir, "slow")
    prompts = list(parts.task.batch(0, made.prompts_per_step))
    parts.sync.push(parts.learner, parts.engine)
    groups = sample_groups(replace(parts, task=Raising()), made, prompts, 0, Clock())
    assert {rollout.grade.error for rollout in groups[0].rollouts} == {
        f"the verifier raised ZeroDivisionError: {prompts[0].id}"
    }


def test_failures_are_counted_by_kind_and_named(tmp_path, tiny_model_dir):
    parts, made = built(tmp_path, tiny_model_dir, "sometimes", "samples_per_prompt=16")
    groups = groups_of(parts, made)
    scored = [rollout for group in groups for rollout in group.rollouts if rollout.grade.scored]
    assert scored
    assert all(rollout.grade.reward == 1.0 for rollout in scored)
    with pytest.raises(HealthStop, match=r"replies \(.*could not be scored; the first, sums/") as stop:
        check_scored(groups, made, 3)
    for kind in ("odd reply", "the grader returned str", "its process ended (exit code 1)"):
        assert kind in str(stop.value)
    lenient = made.model_copy(update={"health": made.health.model_copy(update={"max_unscored": 1.0})})
    assert "most often: " in check_scored(groups, lenient, 3)


def test_the_clock_counts_grading_where_it_belongs():
    clock = Clock()
    with clock("rollout"):
        time.sleep(0.05)
    clock.move(0.03, "rollout", "grade")
    clock.add({"time/grade_work": 1.0})
    clock.add({"time/grade_work": 2.0})
    assert clock.seconds["time/grade"] == 0.03
    assert 0.02 <= clock.seconds["time/rollout"] < 0.2
    assert clock.seconds["time/grade_work"] == 3.0


def test_a_run_says_what_grading_took(tmp_path, tiny_model_dir):
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", "task.verifier={kind: math, fallback: last_line}")
    for row in read_metrics(run):
        if row.step:
            assert {"time/grade", "time/grade_work", "time/grade_slowest"} <= row.metrics.keys()
            assert row.metrics["time/grade"] >= 0
            assert row.metrics["answer/correct"] >= 0
    assert events(run, "finished")
