"""From the replies of a step to an advantage for each token: groups, holes, observations, penalties and values, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import TypeAdapter

from lockstep.algorithms.credit import assign_credit
from lockstep.config.algorithm import Advantage
from lockstep.errors import LearnerError
from lockstep.types import TrainSequence
from tests.algorithms.replies import episode

ADVANTAGE: TypeAdapter[Any] = TypeAdapter(Advantage)
ONE = (True,)
KINDS = ("group", "leave_one_out", "max_rl", "reward", "whitened", "gae")


def credit(settings: dict[str, Any], *episodes: TrainSequence) -> list[TrainSequence]:
    return assign_credit(ADVANTAGE.validate_python(settings), episodes)


def rows(settings: dict[str, Any], *episodes: TrainSequence) -> list[tuple[float, ...]]:
    return [one.advantages for one in credit(settings, *episodes)]


def test_groups_are_compared_within_themselves_whatever_their_order():
    step = (
        episode(7, 1.0, ONE),
        episode(2, 5.0, ONE),
        episode(7, 0.0, ONE),
        episode(2, 9.0, ONE),
        episode(7, 0.5, ONE),
    )
    found = rows({"kind": "group", "divide_by_std": False}, *step)
    assert found == [(0.5,), (-2.0,), (-0.5,), (2.0,), (0.0,)]
    assert rows({"kind": "leave_one_out"}, *step) == [(0.75,), (-4.0,), (-0.75,), (4.0,), (0.0,)]
    assert rows({"kind": "max_rl", "mean_eps": 0.5}, *step) == [(0.5,), (-2 / 7.5,), (-0.5,), (2 / 7.5,), (0.0,)]
    assert rows({"kind": "reward", "baseline": 0.5}, *step) == [(0.5,), (4.5,), (-0.5,), (8.5,), (0.0,)]


def test_a_reply_has_one_advantage_and_observations_have_none():
    step = (episode(0, 1.0, (True, False, True)), episode(0, 0.0, (False, True)))
    assert rows({"kind": "group", "divide_by_std": False}, *step) == [(0.5, 0.0, 0.5), (0.0, -0.5)]


def test_unscored_replies_have_nothing_and_count_in_nothing():
    step = (
        episode(0, 1.0, ONE, (0.1,), (0.2,)),
        episode(0, None, (True, True), (0.5, 0.5), (9.0, 9.0)),
        episode(0, 0.0, ONE, (0.3,), (0.4,)),
    )
    for kind in KINDS:
        with_hole, without = credit({"kind": kind}, *step), credit({"kind": kind}, step[0], step[2])
        assert with_hole[1].advantages == (0.0, 0.0)
        assert not any(with_hole[1].returns or ())
        assert [with_hole[0], with_hole[2]] == without


def test_a_reply_left_out_of_the_loss_still_counts_in_its_groups_mean():
    """As the filter of truncated replies asks for them: no token trained, the reward known."""
    step = (episode(0, 1.0, ONE), episode(0, 0.0, (False, False)), episode(0, 0.5, ONE))
    assert rows({"kind": "group", "divide_by_std": False}, *step) == [(0.5,), (0.0, 0.0), (0.0,)]
    white = rows({"kind": "whitened", "baseline": "group_mean"}, *step)
    assert white == [pytest.approx((math.sqrt(0.5),)), (0.0, 0.0), pytest.approx((-math.sqrt(0.5),))]


def test_the_baseline_form_centres_each_group_first():
    """A group that is better as a whole gains nothing by it."""
    step = (episode(0, 10.0, ONE), episode(0, 12.0, ONE), episode(1, 0.0, ONE), episode(1, 2.0, ONE))
    found = rows({"kind": "whitened", "baseline": "group_mean"}, *step)
    expected = 1 / math.sqrt(4 / 3 + 1e-8)
    assert [row[0] for row in found] == pytest.approx([-expected, expected, -expected, expected])
    plain = rows({"kind": "whitened"}, *step)
    assert plain[0][0] > 0 > plain[3][0]


def test_returns_are_those_before_whitening():
    step = (episode(0, 1.0, ONE, (), (0.25,)), episode(0, 0.0, ONE, (), (0.5,)))
    raw, white = (credit({"kind": "gae", "whiten": whiten}, *step) for whiten in (False, True))
    assert [one.returns for one in white] == [one.returns for one in raw] == [(1.0,), (0.0,)]
    assert [one.advantages for one in raw] == [(0.75,), (-0.5,)]
    spread = math.sqrt(1.25**2 / 2 + 1e-8)
    assert [one.advantages[0] for one in white] == pytest.approx([0.625 / spread, -0.625 / spread])


def test_a_critic_is_not_left_out_in_silence():
    with pytest.raises(LearnerError, match="a reply of 2 tokens has 0 values"):
        credit({"kind": "gae"}, episode(0, 1.0, (True, True)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_named(bad: float):
    good = episode(0, 0.0, ONE, (0.0,), (0.0,))
    cases = {
        "the reply has a reward of": episode(3, bad, ONE, (0.0,), (0.0,)),
        "the reply has a KL penalty of": episode(3, 0.0, ONE, (bad,), (0.0,)),
        "the reply has a value of": episode(3, 0.0, ONE, (0.0,), (bad,)),
    }
    for message, one in cases.items():
        with pytest.raises(LearnerError, match=f"reply 1 of the step, group 3: {message}"):
            credit({"kind": "gae"}, good, one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_replies_has_no_credit(kind: str):
    assert credit({"kind": kind}) == []
    (empty,) = credit({"kind": kind}, episode(0, 1.0, ()))
    assert empty.advantages == ()


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_of_any_size_stay_finite(kind: str):
    step = [episode(0, reward, (True, True), (), (0.0, 1.0)) for reward in (1e308, 0.0, 1.7e308, 0.5)]
    assert all(math.isfinite(value) for row in rows({"kind": kind}, *step) for value in row)


def test_rewards_of_turns_stand_where_they_were_earned():
    """Two replies with an observation between. Of the 2 earned a penalty leaves 1.5: it falls on the last token."""
    trained, zeros = (True, True, False, True, True), (0.0,) * 5
    settings = {"kind": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False}
    by_turn = episode(0, 1.5, trained, values=zeros, turn_rewards=((1, 0.5), (4, 1.5)))
    assert rows(settings, by_turn) == [(1.5, 1.5, 0.0, 1.0, 1.0)]
    assert rows(settings, episode(0, 1.5, trained, values=zeros)) == [(1.5, 1.5, 0.0, 1.5, 1.5)]
    unscored = episode(0, None, trained, values=zeros, turn_rewards=((1, 0.5),))
    assert rows(settings, unscored) == [zeros]
