"""Grading beside generation: the same groups in whatever order replies come, and hardly any time of the step."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from lockstep.errors import EngineError, HealthStop
from lockstep.loops.grading import Grader
from lockstep.loops.journal import Clock
from lockstep.loops.parts import Parts, build_parts, build_task_of
from lockstep.loops.rollouts import check_scored, grade_groups, sample_groups
from lockstep.track.writer import read_metrics
from lockstep.types import Completion, Grade, Prompt
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


def built(folder: Path, model: Path, function: str, *overrides: str) -> tuple[Parts, object]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(OWN)
    made = recipe(
        folder, model, f"task.verifier.path={folder}/own.py:{function}", "task.verifier.workers=2", *overrides
    )
    return build_parts(made, build_task_of(made)), made


def sampled(parts: Parts, made) -> tuple[list[Prompt], list[list[Completion]]]:
    parts.sync.push(parts.learner, parts.engine)
    prompts = list(parts.task.batch(0, made.prompts_per_step))
    return prompts, sample_groups(parts.engine, parts.policy.chat, prompts, made, 0, parts.learner.version)


def test_groups_do_not_depend_on_the_order_of_replies(tmp_path, tiny_model_dir):
    parts, made = built(tmp_path, tiny_model_dir, "slow")
    prompts, rows = sampled(parts, made)
    expected = grade_groups(parts.task, parts.policy.chat, prompts, rows)
    assert len({rollout.grade.reward for group in expected for rollout in group.rollouts}) > 1
    replies = [(prompt, completion) for prompt, row in zip(prompts, rows, strict=True) for completion in row]
    for seed in range(3):
        random.Random(seed).shuffle(replies)
        with Grader(parts.task, parts.policy.chat) as grader:
            for prompt, completion in replies:
                grader.take(prompt, completion)
            assert grader.groups(prompts, rows) == expected
    with Grader(parts.task, parts.policy.chat) as grader:  # a reply that was not taken is graded at the end
        assert grader.groups(prompts, rows) == expected


def test_slow_graders_do_not_hold_up_sampling(tmp_path, tiny_model_dir):
    parts, made = built(tmp_path, tiny_model_dir, "slow")
    prompts, rows = sampled(parts, made)
    with Grader(parts.task, parts.policy.chat) as grader:
        for completion in rows[0] + rows[1]:
            grader.take(prompts[0], completion)
        beside = grader.held
        grader.groups([prompts[0]], [rows[0]])
        assert beside < grader.metrics["time/grade_work"] / 2  # eight replies of 20 ms each
        assert grader.metrics["time/grade_work"] > 0.16
        assert grader.metrics["time/grade_slowest"] >= 0.02


def test_a_reply_is_taken_once(tmp_path, tiny_model_dir):
    parts, made = built(tmp_path, tiny_model_dir, "slow")
    prompts, rows = sampled(parts, made)
    with Grader(parts.task, parts.policy.chat) as grader:
        grader.take(prompts[0], rows[0][0])
        with pytest.raises(EngineError, match="returned it twice"):
            grader.take(prompts[0], rows[0][0])


class Raising:
    name, notes = "raising", ()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        raise ZeroDivisionError(prompt.id)


def test_a_verifier_that_raises_leaves_the_reply_unscored(tmp_path, tiny_model_dir):
    parts, made = built(tmp_path, tiny_model_dir, "slow")
    prompts, rows = sampled(parts, made)
    groups = grade_groups(Raising(), parts.policy.chat, prompts, rows)
    assert {rollout.grade.error for rollout in groups[0].rollouts} == {
        f"the verifier raised ZeroDivisionError: {prompts[0].id}"
    }


def test_failures_are_counted_by_kind_and_named(tmp_path, tiny_model_dir):
    parts, made = built(tmp_path, tiny_model_dir, "sometimes", "samples_per_prompt=16")
    prompts, rows = sampled(parts, made)
    groups = grade_groups(parts.task, parts.policy.chat, prompts, rows)
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
