"""Credit assignment: from the graded replies of a step to an advantage for each of their tokens.

Legend: T response tokens. A reply that is unscored has 0 everywhere and counts in no statistic; one without trained tokens
counts only in its group's mean and deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from typing import TypeAlias, assert_never

from lockstep.algorithms.advantages import gae, group_relative, leave_one_out, max_rl, token_returns, whiten
from lockstep.algorithms.samples import by_sample
from lockstep.algorithms.user_advantage import UserAdvantage, load_estimator
from lockstep.config.algorithm import (
    Advantage,
    GaeAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    MaxRlAdvantage,
    PythonAdvantage,
    RewardAdvantage,
    WhitenedAdvantage,
)
from lockstep.errors import LearnerError
from lockstep.types import TrainSequence, count_trained, repeated

OfGroup: TypeAlias = Callable[[Sequence[float | None]], tuple[float, ...]]


def assign_credit(
    settings: Advantage, replies: Sequence[TrainSequence], estimator: UserAdvantage | None = None
) -> list[TrainSequence]:
    """Return the replies of a step with their advantages, and with a critic their returns. Replies of a group need not be
    neighbours. `estimator`: the user's, if it is loaded.

    Raises LearnerError for a number that is not finite, and for replies without values where a critic's are needed.
    """
    for number, reply in enumerate(replies):
        _require_finite(reply, number)
    match settings:
        case GroupAdvantage():
            return _by_reply(replies, _group_relative(settings))
        case LeaveOneOutAdvantage():
            return _by_reply(replies, leave_one_out)
        case MaxRlAdvantage():
            return _by_reply(replies, partial(max_rl, mean_eps=settings.mean_eps))
        case RewardAdvantage():
            return _by_reply(replies, partial(_above, settings.baseline))
        case WhitenedAdvantage():
            return _whitened(settings, replies)
        case GaeAdvantage():
            return _estimated(settings, replies)
        case PythonAdvantage():
            return (estimator or load_estimator(settings))(replies)
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


def _by_reply(replies: Sequence[TrainSequence], of_group: OfGroup) -> list[TrainSequence]:
    """Return the same advantage for every trained token of a reply."""
    return [
        replace(
            reply,
            advantages=repeated(advantage, len(reply.trained))
            if count_trained(reply.trained) == len(reply.trained)
            else tuple(advantage if trained else 0.0 for trained in reply.trained),
        )
        for reply, advantage in zip(replies, _per_reply(replies, of_group), strict=True)
    ]


def _per_reply(replies: Sequence[TrainSequence], of_group: OfGroup) -> list[float]:
    """Return the advantage of each sequence. A sample counts once in its group, however many rows it has; they share its."""
    members: dict[int, list[list[int]]] = {}
    for rows in by_sample(replies):
        members.setdefault(replies[rows[0]].group, []).append(rows)
    found = [0.0] * len(replies)
    for samples in members.values():
        for rows, advantage in zip(samples, of_group([replies[rows[0]].reward for rows in samples]), strict=True):
            for row in rows:
                found[row] = advantage
    return found


def _whitened(settings: WhitenedAdvantage, replies: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Credit by REINFORCE++ and its baseline form (arXiv 2501.03262)."""
    of_group: OfGroup = partial(_above, 0.0)
    if settings.baseline == "group_mean":
        of_group = partial(group_relative, divide_by_std=False, std_eps=1.0, std_ddof=0)
    masks = [_counted(reply) for reply in replies]
    returns = [
        token_returns(_token_rewards(reply, reward, mask), mask, gamma=settings.gamma)
        for reply, reward, mask in zip(replies, _per_reply(replies, of_group), masks, strict=True)
    ]
    rows = whiten(returns, masks, eps=settings.whiten_eps)
    return [replace(reply, advantages=row) for reply, row in zip(replies, rows, strict=True)]


def _estimated(settings: GaeAdvantage, replies: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Credit by PPO (arXiv 1506.02438, 1707.06347). The returns are those before whitening."""
    masks = [_counted(reply) for reply in replies]
    pairs = []
    for reply, mask in zip(replies, masks, strict=True):
        values_T = reply.values or ()
        if len(values_T) != len(reply.trained):
            raise LearnerError(
                f"a reply of {len(reply.trained)} tokens has {len(values_T)} values of the critic, not one for each token",
                where="algorithm.advantage.kind=gae",
                fix="ask the critic for the values of every reply before credit is assigned",
            )
        rewards_T = _token_rewards(reply, reply.reward or 0.0, mask)
        pairs.append(gae(rewards_T, values_T, mask, gamma=settings.gamma, lam=settings.lam))
    advantages = [row for row, _ in pairs]
    if settings.whiten:
        advantages = whiten(advantages, masks, eps=settings.whiten_eps)
    return [
        replace(reply, advantages=row, returns=returns)
        for reply, row, (_, returns) in zip(replies, advantages, pairs, strict=True)
    ]


def _counted(reply: TrainSequence) -> tuple[bool, ...]:
    return reply.trained if reply.reward is not None else (False,) * len(reply.trained)


def _token_rewards(reply: TrainSequence, reward: float, trained_T: Sequence[bool]) -> list[float]:
    """Return rewards per token: minus the penalty at each trained token, each turn's reward at its end, the rest at the last."""
    penalties_T = reply.penalties or (0.0,) * len(trained_T)
    rewards_T = [-penalty if trained else 0.0 for penalty, trained in zip(penalties_T, trained_T, strict=True)]
    last = next((t for t in range(len(rewards_T) - 1, -1, -1) if trained_T[t]), None)
    if last is None:
        return rewards_T
    for t, earned in reply.turn_rewards:
        if t != last:
            rewards_T[t] += earned
            reward -= earned
    rewards_T[last] += reward
    return rewards_T


def _require_finite(reply: TrainSequence, number: int) -> None:
    named = {"reward": (reply.reward or 0.0,), "KL penalty": reply.penalties, "value": reply.values or ()}
    for name, values in named.items():
        for value in filterfalse(math.isfinite, values):
            raise LearnerError(
                f"the reply has a {name} of {value}, which is not finite",
                where=f"reply {number} of the step, group {reply.group}",
                fix="check the verifier's rewards; if they are finite, use an earlier checkpoint",
            )
