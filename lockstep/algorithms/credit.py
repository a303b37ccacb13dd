"""Credit assignment: from the graded replies of a step to an advantage for each of their tokens.

Legend: T response tokens. A reply that is unscored has 0 everywhere and counts in no statistic; one without trained tokens
counts in its group's mean and deviation only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, assert_never

from lockstep.algorithms.advantages import gae, group_relative, leave_one_out, max_rl, token_returns, whiten
from lockstep.config.algorithm import (
    Advantage,
    GaeAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    MaxRlAdvantage,
    RewardAdvantage,
    WhitenedAdvantage,
)
from lockstep.errors import LearnerError
from lockstep.types import Credit, Episode

OfGroup: TypeAlias = Callable[[Sequence[float | None]], tuple[float, ...]]


def assign_credit(settings: Advantage, episodes: Sequence[Episode]) -> list[Credit]:
    """One Credit for each episode of the step, in their order. Episodes of a group need not be neighbours.

    Raises LearnerError for a number that is not finite, and for episodes without values where a critic's are needed.
    """
    for number, episode in enumerate(episodes):
        _require_finite(episode, number)
    match settings:
        case GroupAdvantage():
            return _by_reply(episodes, _group_relative(settings))
        case LeaveOneOutAdvantage():
            return _by_reply(episodes, leave_one_out)
        case MaxRlAdvantage():
            return _by_reply(episodes, partial(max_rl, mean_eps=settings.mean_eps))
        case RewardAdvantage():
            return _by_reply(episodes, partial(_above, settings.baseline))
        case WhitenedAdvantage():
            return _whitened(settings, episodes)
        case GaeAdvantage():
            return _estimated(settings, episodes)
        case _:
            assert_never(settings)


def _group_relative(settings: GroupAdvantage) -> OfGroup:
    return partial(
        group_relative,
        divide_by_std=settings.divide_by_std,
        std_eps=settings.std_eps,
        std_ddof=settings.std_ddof,
    )


def _above(baseline: float, rewards: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(0.0 if reward is None else reward - baseline for reward in rewards)


def _by_reply(episodes: Sequence[Episode], of_group: OfGroup) -> list[Credit]:
    """The same advantage for every trained token of a reply."""
    return [
        Credit(tuple(advantage if trained else 0.0 for trained in episode.trained))
        for episode, advantage in zip(episodes, _per_reply(episodes, of_group), strict=True)
    ]


def _per_reply(episodes: Sequence[Episode], of_group: OfGroup) -> list[float]:
    members: dict[int, list[int]] = {}
    for number, episode in enumerate(episodes):
        members.setdefault(episode.group, []).append(number)
    found = [0.0] * len(episodes)
    for numbers in members.values():
        for number, advantage in zip(numbers, of_group([episodes[i].reward for i in numbers]), strict=True):
            found[number] = advantage
    return found


def _whitened(settings: WhitenedAdvantage, episodes: Sequence[Episode]) -> list[Credit]:
    """REINFORCE++ and its baseline form (arXiv 2501.03262)."""
    of_group: OfGroup = partial(_above, 0.0)
    if settings.baseline == "group_mean":
        of_group = partial(group_relative, divide_by_std=False, std_eps=1.0, std_ddof=0)
    masks = [_counted(episode) for episode in episodes]
    returns = [
        token_returns(_token_rewards(episode, reward, mask), mask, gamma=settings.gamma)
        for episode, reward, mask in zip(episodes, _per_reply(episodes, of_group), masks, strict=True)
    ]
    return [Credit(row) for row in whiten(returns, masks, eps=settings.whiten_eps)]


def _estimated(settings: GaeAdvantage, episodes: Sequence[Episode]) -> list[Credit]:
    """PPO (arXiv 1506.02438, 1707.06347). The returns are those before whitening."""
    masks = [_counted(episode) for episode in episodes]
    pairs = []
    for episode, mask in zip(episodes, masks, strict=True):
        if len(episode.values) != len(episode.trained):
            raise LearnerError(
                f"a reply of {len(episode.trained)} tokens has {len(episode.values)} values of the critic",
                where="algorithm.advantage.kind = gae",
                fix="ask the critic for the values of every reply before credit is assigned",
            )
        rewards_T = _token_rewards(episode, episode.reward or 0.0, mask)
        pairs.append(gae(rewards_T, episode.values, mask, gamma=settings.gamma, lam=settings.lam))
    advantages = [row for row, _ in pairs]
    if settings.whiten:
        advantages = whiten(advantages, masks, eps=settings.whiten_eps)
    return [Credit(row, returns) for row, (_, returns) in zip(advantages, pairs, strict=True)]


def _counted(episode: Episode) -> tuple[bool, ...]:
    return episode.trained if episode.reward is not None else (False,) * len(episode.trained)


def _token_rewards(episode: Episode, reward: float, trained_T: Sequence[bool]) -> list[float]:
    """Minus the penalty at each trained token, what its turns earned where each of them ends, and the rest at the last token."""
    penalties_T = episode.penalties or (0.0,) * len(trained_T)
    rewards_T = [-penalty if trained else 0.0 for penalty, trained in zip(penalties_T, trained_T, strict=True)]
    last = next((t for t in range(len(rewards_T) - 1, -1, -1) if trained_T[t]), None)
    if last is None:
        return rewards_T
    for t, earned in episode.turn_rewards:
        if t != last:
            rewards_T[t] += earned
            reward -= earned
    rewards_T[last] += reward
    return rewards_T


def _require_finite(episode: Episode, number: int) -> None:
    named = {"reward": (episode.reward or 0.0,), "KL penalty": episode.penalties, "value": episode.values}
    for name, values in named.items():
        for value in values:
            if not math.isfinite(value):
                raise LearnerError(
                    f"a {name} is {value}",
                    where=f"reply {number} of the step, group {episode.group}",
                    fix="a verifier pays a finite number or none (unscored); values and penalties come from the models",
                )
