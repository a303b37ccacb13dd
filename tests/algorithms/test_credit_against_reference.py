"""Every advantage estimator against the loops of `reference.py`: 50 random ragged steps each, 200 in make test-all, to 1e-10."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.algorithms.build import Objective, build_objective
from lockstep.algorithms.kl import kl_penalty, reward_penalties
from lockstep.algorithms.losses import value_loss
from lockstep.algorithms.overlong import overlong_penalty
from lockstep.types import TrainSequence
from tests.algorithms import reference as ref
from tests.algorithms.ragged import batches, recipe, steps
from tests.algorithms.reference import Row

random_steps = settings(max_examples=2 * settings().max_examples, suppress_health_check=list(HealthCheck))


@cache
def _objective(settings: str) -> Objective:
    return build_objective(recipe(json.loads(settings)))


def credit(algorithm: dict[str, Any], step: Sequence[TrainSequence]) -> list[TrainSequence]:
    return _objective(json.dumps(algorithm)).credit(step)


def close(expected: Sequence[float]) -> Any:
    return pytest.approx(list(expected), rel=1e-10, abs=1e-10)


def by_group(step: Sequence[TrainSequence], estimator: Callable[[Sequence[float | None]], Row]) -> Row:
    """An estimator over the rewards of each group, back in the order of the replies."""
    found = [0.0] * len(step)
    for group in {one.group for one in step}:
        members = [i for i, one in enumerate(step) if one.group == group]
        for member, advantage in zip(members, estimator([step[i].reward for i in members]), strict=True):
            found[member] = advantage
    return found


def constant(reward: float, rewards: Sequence[float | None]) -> Row:
    return [0.0 if r is None else r - reward for r in rewards]


# --- one advantage for a whole reply ----------------------------------------------------------------------------------
PER_REPLY: dict[str, tuple[dict[str, Any], Callable[[Sequence[float | None]], Row]]] = {
    "grpo": ({"kind": "grpo"}, partial(ref.group, divide=True, eps=1e-6, ddof=1)),
    "grpo, population deviation": (
        {"advantage": {"kind": "group", "std_ddof": 0, "std_eps": 0.01}},
        partial(ref.group, divide=True, eps=0.01, ddof=0),
    ),
    "dr_grpo": ({"kind": "dr_grpo"}, partial(ref.group, divide=False, eps=0.0, ddof=1)),
    "rloo": ({"kind": "rloo"}, ref.leave_one_out),
    "max_rl": ({"kind": "max_rl"}, partial(ref.max_rl, eps=1e-6)),
    "reinforce": ({"kind": "reinforce", "advantage": {"kind": "reward", "baseline": 0.25}}, partial(constant, 0.25)),
}


@pytest.mark.parametrize("name", PER_REPLY)
@given(step=steps())
@random_steps
def test_one_advantage_for_a_reply(name: str, step: tuple[TrainSequence, ...]):
    algorithm, estimator = PER_REPLY[name]
    for episode, advantage, found in zip(step, by_group(step, estimator), credit(algorithm, step), strict=True):
        assert found.advantages == close([advantage if trained else 0.0 for trained in episode.trained])


# --- one for each token -----------------------------------------------------------------------------------------------
def rows_of(step: Sequence[TrainSequence], rewards: Sequence[float]) -> tuple[list[Row], list[tuple[bool, ...]]]:
    """Token rewards and masks; an unscored reply has no trained token."""
    masks = [e.trained if e.reward is not None else (False,) * len(e.trained) for e in step]
    rows = [
        ref.token_rewards(reward, episode.penalties or (0.0,) * len(mask), mask)
        for episode, reward, mask in zip(step, rewards, masks, strict=True)
    ]
    return rows, masks


@pytest.mark.parametrize("baseline", ["none", "group_mean"])
@given(step=steps(penalties=True), gamma=st.sampled_from([1.0, 0.9]))
@random_steps
def test_whitened_returns(baseline: str, step: tuple[TrainSequence, ...], gamma: float):
    estimator = partial(constant, 0.0) if baseline == "none" else partial(ref.group, divide=False, eps=0.0, ddof=1)
    rows, masks = rows_of(step, by_group(step, estimator))
    returns = [ref.returns(row, mask, gamma=gamma) for row, mask in zip(rows, masks, strict=True)]
    expected = ref.whiten(returns, masks, eps=1e-8, ddof=1)
    kind = "reinforce_pp" if baseline == "none" else "reinforce_pp_baseline"
    advantage = {"kind": "whitened", "baseline": baseline, "gamma": gamma}
    found = credit({"kind": kind, "advantage": advantage, "kl": {"coef": 0.1, "placement": "reward"}}, step)
    for row, own in zip(expected, found, strict=True):
        assert own.advantages == close(row)


@pytest.mark.parametrize("whiten", [True, False])
@given(
    step=steps(penalties=True, values=True),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)
@random_steps
def test_generalised_advantages(whiten: bool, step: tuple[TrainSequence, ...], gamma: float, lam: float):
    rows, masks = rows_of(step, [episode.reward or 0.0 for episode in step])
    pairs = [
        ref.gae(row, episode.values, mask, gamma=gamma, lam=lam)
        for row, episode, mask in zip(rows, step, masks, strict=True)
    ]
    expected = [advantages for advantages, _ in pairs]
    if whiten:
        expected = ref.whiten(expected, masks, eps=1e-8, ddof=1)
    found = credit({"kind": "ppo", "advantage": {"kind": "gae", "gamma": gamma, "lam": lam, "whiten": whiten}}, step)
    for row, (_, targets), own in zip(expected, pairs, found, strict=True):
        assert own.advantages == close(row)
        assert own.returns == close(targets)


# --- single numbers ---------------------------------------------------------------------------------------------------
@given(
    tokens=st.integers(0, 60),
    most=st.integers(1, 50),
    buffer=st.integers(0, 50),
    penalty=st.sampled_from([0.0, 0.5, 1.0]),
)
@random_steps
def test_the_overlong_penalty(tokens: int, most: int, buffer: int, penalty: float):
    buffer = min(buffer, most)
    found = overlong_penalty(tokens, most, buffer=buffer, penalty=penalty)
    assert found == pytest.approx(ref.overlong(tokens, most, buffer=buffer, penalty=penalty), abs=1e-10)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(batch=batches())
@random_steps
def test_divergence_of_each_token_and_as_a_penalty(estimator: Any, batch: Any):
    tokens = [token for row in batch.rows for token in row]
    own, other = [token.old for token in tokens], [token.ref for token in tokens]
    expected = [ref.kl(a, b, estimator) for a, b in zip(own, other, strict=True)]
    wide = [torch.tensor(values, dtype=torch.float64) for values in (own, other)]
    assert kl_penalty(*wide, estimator).tolist() == close(expected)
    mask = [number % 3 != 1 for number in range(len(tokens))]
    found = reward_penalties(own, other, mask, estimator=estimator, coef=0.3)
    assert found == close([0.3 * x if t else 0.0 for x, t in zip(expected, mask, strict=True)])


@given(batch=batches(), clip=st.sampled_from([None, 0.05, 0.2]))
@random_steps
def test_the_value_loss(batch: Any, clip: float | None):
    """Any three columns of numbers will do for values, old values and targets."""
    tokens = [token for row in batch.rows for token in row]
    values, targets = [t.advantage for t in tokens], [t.entropy for t in tokens]
    old = [t.advantage + 0.1 * (t.logp + 1.4) for t in tokens]  # above and below
    values_T, old_T, targets_T = (torch.tensor(x, dtype=torch.float64) for x in (values, old, targets))
    values_T.requires_grad_()
    loss_T = value_loss(values_T, old_T, targets_T, clip)
    assert loss_T.tolist() == close(ref.value_loss(values, old, targets, clip))
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), values_T)
    step = 1e-6
    up, here, down = (ref.value_loss([v + s for v in values], old, targets, clip) for s in (step, 0.0, -step))
    for gradient, high, middle, low in zip(gradient_T.tolist(), up, here, down, strict=True):
        sides = ((middle - low) / step, (high - middle) / step)
        assert min(sides) - 1e-5 <= gradient <= max(sides) + 1e-5
        if abs(sides[1] - sides[0]) < 1e-5:
            assert gradient == pytest.approx((high - low) / (2 * step), rel=1e-6, abs=1e-6)
