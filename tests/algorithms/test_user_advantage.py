from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Recipe
from lockstep.errors import LearnerError
from lockstep.types import TrainSequence

OWN = """
import torch


def centred(replies, scale=1.0):
    groups = {}
    for one in replies:
        groups.setdefault(one.group, []).append(one.reward or 0.0)
    return [scale * ((one.reward or 0.0) - sum(groups[one.group]) / len(groups[one.group])) for one in replies]


def by_token(replies):
    return torch.arange(3.0).repeat(len(replies), 1)


def short(replies):
    return [1.0]


def infinite(replies):
    return [float("inf") for _ in replies]


def huge(replies):
    return [10**400 for _ in replies]


def fails(replies):
    return [one.prize for one in replies]


def alone():
    return []
"""


def replies(*rewards: float | None) -> list[TrainSequence]:
    return [
        TrainSequence((1,), (2, 3, 4), (True, False, True), (-1.0,) * 3, (0.0,) * 3, 0.0, group=i // 2, reward=reward)
        for i, reward in enumerate(rewards)
    ]


def credit(tmp_path: Path, name: str, **settings: Any) -> Any:
    (tmp_path / "own.py").write_text(OWN)
    advantage = {"kind": "python", "path": f"{tmp_path}/own.py:{name}", "settings": settings}
    return build_objective(Recipe.model_validate({"algorithm": {"kind": "grpo", "advantage": advantage}})).credit


def test_an_estimator_of_ones_own_gives_the_advantages(tmp_path: Path) -> None:
    found = credit(tmp_path, "centred", scale=2.0)(replies(1.0, 0.0, 0.0, None))
    assert [one.advantages for one in found] == [(1.0, 0.0, 1.0), (-1.0, 0.0, -1.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)]


def test_it_may_give_one_for_each_token(tmp_path: Path) -> None:
    found = credit(tmp_path, "by_token")(replies(1.0, None))
    assert [one.advantages for one in found] == [(0.0, 0.0, 2.0), (0.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("short", "returned 1 values for 6 replies"),
        ("infinite", "the advantage of reply 0 is inf"),
        ("huge", "the advantage of reply 0 is 1000"),
        ("fails", r"estimator fails: AttributeError.*prize.*own\.py:\d+"),
        ("alone", r"would be called with \(replies\)"),
        ("none", "has no none"),
    ],
)
def test_one_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(LearnerError, match=why):
        credit(tmp_path, name)


def test_a_path_alone_is_short_for_it_and_the_formula_names_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    recipe = Recipe.model_validate({"algorithm": {"kind": "grpo", "advantage": f"{tmp_path}/own.py:centred"}})
    assert f"A_t by {tmp_path}/own.py:centred" in build_objective(recipe).formula
