"""Group-relative advantages by hand, and for anything that a verifier can pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.advantages import group_relative

EPS = 1e-6
sample = partial(group_relative, divide_by_std=True, std_eps=EPS, std_ddof=1)
population = partial(group_relative, divide_by_std=True, std_eps=EPS, std_ddof=0)
centred = partial(group_relative, divide_by_std=False, std_eps=EPS, std_ddof=1)


def test_by_hand():
    rewards = (1.0, 0.0, 0.0, 1.0)  # mean 1/2; Σ (r - 1/2)² = 1
    assert sample(rewards) == pytest.approx([s * 0.5 / (math.sqrt(1 / 3) + EPS) for s in (1, -1, -1, 1)], rel=1e-12)
    assert population(rewards) == pytest.approx([s * 0.5 / (0.5 + EPS) for s in (1, -1, -1, 1)], rel=1e-12)
    assert centred(rewards) == (0.5, -0.5, -0.5, 0.5)
    rewards = (3.0, 1.0, 2.0)  # mean 2; Σ = 2
    assert sample(rewards) == pytest.approx([1 / (1 + EPS), -1 / (1 + EPS), 0.0], rel=1e-12)
    assert population(rewards) == pytest.approx([1 / (math.sqrt(2 / 3) + EPS), -1 / (math.sqrt(2 / 3) + EPS), 0.0])
    assert centred(rewards) == (1.0, -1.0, 0.0)


def test_the_epsilon_in_force_is_the_one_given():
    (first, _) = group_relative((2.0, 0.0), divide_by_std=True, std_eps=0.5, std_ddof=0)
    assert first == pytest.approx(1 / 1.5)


@pytest.mark.parametrize("rewards", [(0.0, 0.0, 0.0), (1.0,) * 8, (0.1,) * 7, (-3.25, -3.25)])
def test_a_group_of_equals_teaches_nothing(rewards: tuple[float, ...]):
    for function in (sample, population, centred):
        assert function(rewards) == (0.0,) * len(rewards)


@pytest.mark.parametrize("rewards", [(), (1.0,), (None,), (None, 1.0), (None, 0.5, None), (None, None)])
def test_fewer_than_two_scored_samples_teach_nothing(rewards: tuple[float | None, ...]):
    for function in (sample, population, centred):
        assert function(rewards) == (0.0,) * len(rewards)


def test_unscored_samples_count_in_nothing():
    for function in (sample, population, centred):
        with_holes = function((1.0, None, 0.0, None, 0.0))
        without = function((1.0, 0.0, 0.0))
        assert with_holes == (without[0], 0.0, without[1], 0.0, without[2])
        assert with_holes[0] != function((1.0, 0.0, 0.0, 0.0, 0.0))[0], "an error is not a reward of 0"


REWARDS = st.lists(st.none() | st.floats(-1e100, 1e100), max_size=12)


@given(REWARDS, st.booleans(), st.sampled_from([0, 1]))
def test_never_nan_whatever_is_paid(rewards: Sequence[float | None], divide: bool, ddof: int):
    found = group_relative(rewards, divide_by_std=divide, std_eps=EPS, std_ddof=ddof)
    assert len(found) == len(rewards)
    assert all(math.isfinite(value) for value in found)
    assert all(value == 0.0 for value, reward in zip(found, rewards, strict=True) if reward is None)
    scored = [reward for reward in rewards if reward is not None]
    if divide:
        assert all(abs(value) <= math.sqrt(max(1, len(scored))) + 1e-9 for value in found)
    # The better reward never has the lower advantage.
    ranked = sorted((r, a) for r, a in zip(rewards, found, strict=True) if r is not None)
    assert [a for _, a in ranked] == sorted(a for _, a in ranked)


@given(st.lists(st.integers(-100, 100), min_size=2, max_size=12), st.integers(1, 9), st.integers(-50, 50))
def test_shifts_change_nothing_and_scales_only_the_undivided(rewards: list[int], scale: int, shift: int):
    moved = [scale * reward + shift for reward in rewards]
    assert centred(moved) == pytest.approx([scale * value for value in centred(rewards)], abs=1e-9)
    if len(set(rewards)) > 1:
        assert sample(moved) == pytest.approx(sample(rewards), abs=1e-4)
        assert math.fsum(sample(rewards)) == pytest.approx(0, abs=1e-9)
        spread = math.sqrt(math.fsum(value**2 for value in sample(rewards)) / (len(rewards) - 1))
        assert spread == pytest.approx(1, abs=1e-4)
