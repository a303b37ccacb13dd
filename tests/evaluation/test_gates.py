from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from lockstep.config.schema import Recipe
from lockstep.evaluation.gates import judged_line, verdict_lines
from lockstep.evaluation.plan import evaluation_steps, is_due, plan_lines, replies_in_all
from lockstep.evaluation.records import score_path, write_score
from lockstep.track.rundir import RunDirectory
from tests.evaluation.scores import score
from tests.track.runs import FACTS, RECIPE

AIME = {"role": "sanity", "items": 30, "every": 10, "modes": ["avg@8"]}
OOD = {"role": "ood_probe", "items": 202, "every": 5, "modes": ["greedy_pass@1"]}


def recipe(**settings: object) -> Recipe:
    base = {"every": 20, "items": 100, "modes": ["greedy"], "also": [OOD, AIME]}
    return Recipe.model_validate({"steps": 30, "eval": {**base, **settings}})


def test_each_set_has_its_own_cadence_modes_temperature_and_samples() -> None:
    asked = recipe()
    assert evaluation_steps(asked) == (0, 5, 10, 15, 20, 25, 30)
    due = {step: [one.role for one in asked.eval.sets if is_due(asked, one, step)] for step in evaluation_steps(asked)}
    assert due[5] == due[25] == ["ood_probe"]
    assert due[10] == ["ood_probe", "sanity"]
    assert due[0] == due[20] == due[30] == ["id_probe", "ood_probe", "sanity"]
    (sampled,) = [mode for one, mode in asked.eval.pairs if one.role == "sanity"]
    assert (sampled.temperature, sampled.samples) == (0.6, 8)
    assert replies_in_all(asked) == 3 * 100 + 7 * 202 + 4 * 30 * 8
    assert "202 items of ood_probe every 5: greedy_pass@1 (T=0)" in plan_lines(asked)[0]
    assert "30 items of sanity every 10: avg@8 (T=0.6, 8 samples" in plan_lines(asked)[0]


def test_a_step_that_is_judged_evaluates_every_set() -> None:
    asked = recipe(judged={"steps": [7], "preset": "gain_and_hold"})
    assert 7 in evaluation_steps(asked)
    assert all(is_due(asked, one, 7) for one in asked.eval.sets)
    assert (
        "will be judged at steps 7; success: greedy improves, and ood_probe.greedy_pass@1 holds, at one of them"
        in plan_lines(asked)
    )


@pytest.mark.parametrize(
    ("judged", "why"),
    [
        ({"steps": [5], "gates": [{"score": "ood.greedy"}]}, "there is no score ood.greedy"),
        ({"steps": [5], "gates": [{"score": "sanity.avg@8"}]}, "must not decide anything"),
        ({"steps": [5]}, "judged needs both"),
        ({"gates": [{"score": "greedy"}]}, "judged needs both"),
    ],
)
def test_what_cannot_judge_is_refused_before_the_run(judged: object, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        recipe(judged=judged)


def test_a_run_is_judged_by_what_was_said_beforehand(tmp_path: Path) -> None:
    judged = {"steps": [10, 20], "preset": "gain", "gates": [{"score": "greedy", "rule": "reaches", "limit": 0.5}]}
    asked = recipe(judged=judged)
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        marks = {0: [False] * 40, 10: [True] * 7 + [False] * 33, 20: [True] * 24 + [False] * 16}
        for step in (0, 10):
            write_score(score_path(run.path, step, "greedy"), score(marks[step], weights=f"{step:016d}", step=step))
        # 7 of 40 rose: p = 0.016, below 0.05 over two steps
        assert judged_line(asked, run, 10) == (
            "judged at step 10, as said beforehand: not passed; greedy improves: yes, +17.5 points, p 0.016 of 0.025; "
            "greedy reaches 50 %: no, 17.5%"
        )
        assert verdict_lines(asked, run)[-1] == (
            "verdict by what was said beforehand (2 steps, 1 not reached): no success"
        )
        write_score(score_path(run.path, 20, "greedy"), score(marks[20], weights=f"{20:016d}", step=20))
        assert verdict_lines(asked, run)[-1] == "verdict by what was said beforehand (2 steps): success at step 20"


def test_a_score_that_falls_does_not_hold(tmp_path: Path) -> None:
    gates = {"steps": [10], "gates": [{"score": "greedy", "rule": "holds"}]}
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        for step, right in ((0, 30), (10, 15)):
            marks = [True] * right + [False] * (40 - right)
            write_score(score_path(run.path, step, "greedy"), score(marks, weights=f"{step:016d}", step=step))
        assert "greedy holds: no, -37.5 points" in judged_line(recipe(judged=gates), run, 10)
