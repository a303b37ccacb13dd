"""Advantages by hand, and for anything that a verifier can pay."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.advantages import gae, group_relative, leave_one_out, max_rl, token_returns, whiten
from lockstep.errors import LearnerError

EPS = 1e-6
LARGEST = sys.float_info.max
sample = partial(group_relative, divide_by_std=True, std_eps=EPS, std_ddof=1)
population = partial(group_relative, divide_by_std=True, std_eps=EPS, std_ddof=0)
centred = partial(group_relative, divide_by_std=False, std_eps=EPS, std_ddof=1)
by_mean = partial(max_rl, mean_eps=EPS)
OF_GROUP: tuple[Callable[[Sequence[float | None]], tuple[float, ...]], ...] = (
    sample,
    population,
    centred,
    leave_one_out,
    by_mean,
)


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


def test_leave_one_out_by_hand():
    """3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2."""
    assert leave_one_out((3.0, 1.0, 2.0)) == pytest.approx([1.5, -1.5, 0.0], rel=1e-12)
    assert leave_one_out((1.0, 0.0)) == (1.0, -1.0)
    assert leave_one_out((1.0, None, 0.0, 0.0)) == pytest.approx([1.0, 0.0, -0.5, -0.5])


def test_max_rl_by_hand():
    """Mean 1/4: one right reply of four weighs three times as much as it would under a mean of 3/4."""
    assert by_mean((1.0, 0.0, 0.0, 0.0)) == pytest.approx([0.75 / (0.25 + EPS), *[-0.25 / (0.25 + EPS)] * 3], rel=1e-12)
    assert max_rl((3.0, 1.0), mean_eps=2.0) == pytest.approx([1 / 4, -1 / 4])


def test_max_rl_refuses_rewards_below_zero():
    """(R - mean) / mean would turn the signs round below a negative mean."""
    with pytest.raises(LearnerError, match=r"-0\.5 is negative"):
        by_mean((1.0, -0.5, None))


@pytest.mark.parametrize("rewards", [(0.0, 0.0, 0.0), (1.0,) * 8, (0.1,) * 7, (1e308,) * 3])
def test_a_group_of_equals_teaches_nothing(rewards: tuple[float, ...]):
    assert centred((-3.25, -3.25)) == sample((-0.1,) * 3)[:2] == (0.0, 0.0)
    for function in OF_GROUP:
        assert function(rewards) == (0.0,) * len(rewards)


@pytest.mark.parametrize("rewards", [(), (1.0,), (None,), (None, 1.0), (None, 0.5, None), (None, None)])
def test_fewer_than_two_scored_samples_teach_nothing(rewards: tuple[float | None, ...]):
    for function in OF_GROUP:
        assert function(rewards) == (0.0,) * len(rewards)


def test_unscored_samples_count_in_nothing():
    for function in OF_GROUP:
        with_holes = function((1.0, None, 0.0, None, 0.0))
        without = function((1.0, 0.0, 0.0))
        assert with_holes == (without[0], 0.0, without[1], 0.0, without[2])
        assert with_holes[2] != function((1.0, 0.0, 0.0, 0.0, 0.0))[2], "an error is not a reward of 0"


@pytest.mark.parametrize("size", [1e150, 1e200, 1e308, LARGEST])
def test_rewards_of_any_size_are_compared(size: float):
    """Their squares, their sums and even their differences are beyond a float; the answers are not."""
    half = math.sqrt(2) / 2  # (1 - 1/2) / std of (1, 0)
    assert sample((size, 0.0)) == pytest.approx([half, -half], rel=1e-12)
    assert population((size, 0.0, 0.0, size)) == pytest.approx([1, -1, -1, 1], rel=1e-12)
    assert centred((size, 0.0)) == (size / 2, -size / 2)
    assert leave_one_out((size, 0.0, 0.0)) == pytest.approx([size, -size / 2, -size / 2], rel=1e-12)
    assert by_mean((size, 0.0)) == pytest.approx([1, -1], rel=1e-12)


def test_only_what_no_float_can_hold_is_cut():
    assert leave_one_out((LARGEST, -LARGEST)) == (LARGEST, -LARGEST)
    assert centred((LARGEST, -LARGEST, -LARGEST))[0] == LARGEST
    assert centred((LARGEST, -LARGEST)) == (LARGEST, -LARGEST)


REWARDS = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=12)


@given(REWARDS, st.booleans(), st.sampled_from([0, 1]))
def test_never_nan_whatever_is_paid(rewards: Sequence[float | None], divide: bool, ddof: int):
    positive = [None if reward is None else abs(reward) for reward in rewards]
    grouped = group_relative(rewards, divide_by_std=divide, std_eps=EPS, std_ddof=ddof)
    scored = [reward for reward in rewards if reward is not None]
    if divide:
        assert all(abs(value) <= math.sqrt(max(1, len(scored))) + 1e-9 for value in grouped)
    for given_rewards, found in (
        (rewards, grouped),
        (rewards, leave_one_out(rewards)),
        (positive, by_mean(positive)),
    ):
        assert len(found) == len(rewards)
        assert all(math.isfinite(value) for value in found)
        assert all(value == 0.0 for value, reward in zip(found, rewards, strict=True) if reward is None)
        # The better reward never has the lower advantage.
        ranked = sorted((r, a) for r, a in zip(given_rewards, found, strict=True) if r is not None)
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


# --- per token --------------------------------------------------------------------------------------------------------
MIXED = (True, False, False, True, True)
"""Two observation tokens after the first."""


def test_returns_by_hand():
    rewards = (-0.1, 9.0, 9.0, -0.2, 1.0)  # what stands at observations is not read
    assert token_returns(rewards, MIXED, gamma=1.0) == pytest.approx([0.7, 0.0, 0.0, 0.8, 1.0])
    # 1; -0.2 + 1/2; -0.1 + 0.3/2: observations take no discount
    assert token_returns(rewards, MIXED, gamma=0.5) == pytest.approx([0.05, 0.0, 0.0, 0.3, 1.0])
    assert token_returns((1.0, 2.0), (False, False), gamma=1.0) == (0.0, 0.0)
    assert token_returns((), (), gamma=1.0) == ()


def test_advantages_of_a_critic_by_hand():
    rewards, values = (0.0, 9.0, 9.0, 0.0, 1.0), (0.5, 7.0, 7.0, 0.25, 0.75)
    # γ 0.5, λ 0.5. δ: 1 - 0.75 = 0.25;  0.5·0.75 - 0.25 = 0.125;  0.5·0.25 - 0.5 = -0.375.
    # A: 0.25;  0.125 + 0.25·0.25 = 0.1875;  -0.375 + 0.25·0.1875 = -0.328125.
    advantages, returns = gae(rewards, values, MIXED, gamma=0.5, lam=0.5)
    assert advantages == (-0.328125, 0.0, 0.0, 0.1875, 0.25)
    assert returns == (0.171875, 0.0, 0.0, 0.4375, 1.0)


def test_lambda_one_trusts_the_rewards_and_zero_the_critic():
    rewards, values, trained = (0.0, 0.0, 1.0), (0.3, -0.2, 0.6), (True,) * 3
    advantages, returns = gae(rewards, values, trained, gamma=1.0, lam=1.0)
    assert advantages == pytest.approx([0.7, 1.2, 0.4])
    assert returns == pytest.approx([1.0, 1.0, 1.0])
    advantages, returns = gae(rewards, values, trained, gamma=1.0, lam=0.0)
    assert advantages == pytest.approx([-0.5, 0.8, 0.4])
    assert returns == pytest.approx([-0.2, 0.6, 1.0])


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), max_size=8),
    st.floats(0.1, 1),
    st.floats(0, 1),
)
def test_observations_change_nothing(tokens: list[tuple[float, float, bool]], gamma: float, lam: float):
    """With observation tokens anywhere, the others are credited as if they stood alone."""
    rewards, values, trained = ([token[part] for token in tokens] for part in range(3))
    kept = [t for t, chosen in enumerate(trained) if chosen]
    alone = gae([rewards[t] for t in kept], [values[t] for t in kept], [True] * len(kept), gamma=gamma, lam=lam)
    for found, expected in zip(gae(rewards, values, trained, gamma=gamma, lam=lam), alone, strict=True):
        assert tuple(found[t] for t in kept) == expected
        assert all(found[t] == 0.0 for t in range(len(tokens)) if t not in kept)
    returns = token_returns(rewards, trained, gamma=gamma)
    assert tuple(returns[t] for t in kept) == token_returns([rewards[t] for t in kept], [True] * len(kept), gamma=gamma)


def test_whitening_by_hand():
    """Of 1, 2 and 6, over two responses: mean 3, variance (4 + 1 + 9) / 2 = 7."""
    rows = whiten([(1.0, 99.0, 2.0), (6.0,), ()], [(True, False, True), (True,), ()], eps=2.0)
    assert [len(row) for row in rows] == [3, 1, 0]
    assert rows[0] == pytest.approx([-2 / 3, 0.0, -1 / 3])
    assert rows[1] == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("values", "trained"),
    [
        ([], []),
        ([()], [()]),
        ([(5.0,)], [(True,)]),
        ([(5.0, 7.0)], [(False, True)]),
        ([(5.0, 5.0), (5.0,)], [(True, True), (True,)]),
        ([(1e308, 1e308), (1e308,)], [(True, True), (True,)]),
    ],
)
def test_nothing_to_whiten(values: list[tuple[float, ...]], trained: list[tuple[bool, ...]]):
    assert whiten(values, trained, eps=1e-8) == [(0.0,) * len(row) for row in values]


@given(
    st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=6), max_size=5),
    st.floats(0.1, 1),
)
def test_tokens_are_never_nan(rows: list[list[float]], gamma: float):
    trained = [[t % 3 != 1 for t in range(len(row))] for row in rows]
    for row, mask in zip(rows, trained, strict=True):
        found = [token_returns(row, mask, gamma=gamma), *gae(row, row[::-1], mask, gamma=gamma, lam=0.9)]
        assert all(math.isfinite(value) for column in found for value in column)
    white = whiten(rows, trained, eps=1e-8)
    assert all(math.isfinite(value) for row in white for value in row)
    pool = [v for row, mask in zip(white, trained, strict=True) for v, t in zip(row, mask, strict=True) if t]
    # The mean is rounded to a double, which a spread as small as that rounding shows.
    raw = [v for row, mask in zip(rows, trained, strict=True) for v, t in zip(row, mask, strict=True) if t]
    spread = max(raw) / 2 - min(raw) / 2 if raw else 0.0
    blur = 2**-48 * max(map(abs, raw)) / spread if spread else 0.0
    assert abs(math.fsum(pool)) <= (1e-6 + blur) * max(1, len(pool))


@pytest.mark.parametrize("size", [1.0, 1e160, 1e308])
def test_whitened_tokens_have_mean_0_and_deviation_1_at_any_size(size: float):
    (row,) = whiten([(size, 0.0, 0.5 * size, -0.5 * size)], [(True,) * 4], eps=1e-20)
    assert math.fsum(row) == pytest.approx(0, abs=1e-12)
    assert math.fsum(value**2 for value in row) / 3 == pytest.approx(1, rel=1e-12)
