"""Computes the advantage of each sample or token from rewards. Pure functions in float64; finite for finite input.

Legend: G samples of one prompt, T response tokens, N responses. An unscored sample (reward None) has advantage 0 and takes no
part in its group's statistics. Tokens that are not trained (observations) have 0 and are skipped: later credit passes across
them without a discount.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.errors import LearnerError

_LARGEST = sys.float_info.max


def group_relative(
    rewards_G: Sequence[float | None], *, divide_by_std: bool, std_eps: float, std_ddof: int
) -> tuple[float, ...]:
    """GRPO: A_i = (R_i - mean(R)) / (std(R) + eps) (DeepSeekMath, arXiv 2402.03300, §4.1.2).

    Without the division it is Dr.GRPO's (arXiv 2503.20783). A group whose scored rewards are all equal, or that has fewer
    than two, gives zeros.
    """
    scored = _scored(rewards_G)
    if _equal(scored):
        return (0.0,) * len(rewards_G)
    exponent = _exponent(scored)
    mean = _mean(scored, exponent)
    if not divide_by_std:
        return _each(rewards_G, lambda reward: _grown(math.ldexp(reward, -exponent) - mean, exponent))
    variance = math.fsum((math.ldexp(r, -exponent) - mean) ** 2 for r in scored) / (len(scored) - std_ddof)
    scale = math.sqrt(variance) + math.ldexp(std_eps, -exponent)
    return _each(rewards_G, lambda reward: (math.ldexp(reward, -exponent) - mean) / scale)


def leave_one_out(rewards_G: Sequence[float | None]) -> tuple[float, ...]:
    """RLOO: A_i = R_i - mean of the group's other rewards = (R_i - mean(R)) · G / (G - 1) (arXiv 2402.14740, §3).

    G counts scored samples. Fewer than two scored samples give zeros.
    """
    scored = _scored(rewards_G)
    if _equal(scored):
        return (0.0,) * len(rewards_G)
    exponent, factor = _exponent(scored), len(scored) / (len(scored) - 1)
    mean = _mean(scored, exponent)
    return _each(rewards_G, lambda reward: _grown((math.ldexp(reward, -exponent) - mean) * factor, exponent))


def max_rl(rewards_G: Sequence[float | None], *, mean_eps: float) -> tuple[float, ...]:
    """MaxRL: A_i = (R_i - mean(R)) / (mean(R) + eps), zeros if no sample is better than another.

    Raises LearnerError for a negative reward, with which the mean would not measure how often a prompt is solved.
    """
    scored = _scored(rewards_G)
    if scored and min(scored) < 0:
        raise LearnerError(
            f"a reward of {min(scored):g} is negative, and max_rl divides by the mean reward",
            where="algorithm.advantage",
            fix="let the verifier give rewards of 0 or more, or set another algorithm.advantage.kind",
        )
    if _equal(scored):
        return (0.0,) * len(rewards_G)
    exponent = _exponent(scored)
    mean = _mean(scored, exponent)
    scale = mean + math.ldexp(mean_eps, -exponent)
    return _each(rewards_G, lambda reward: (math.ldexp(reward, -exponent) - mean) / scale)


def token_returns(rewards_T: Sequence[float], trained_T: Sequence[bool], *, gamma: float) -> tuple[float, ...]:
    """REINFORCE++: G_t = R_t + γ G_{t'}, t' the next trained token (arXiv 2501.03262). Rewards of other tokens are not read."""
    found, later = [0.0] * len(rewards_T), 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        if trained_T[t]:
            later = _finite(rewards_T[t] + gamma * later)
            found[t] = later
    return tuple(found)


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], trained_T: Sequence[bool], *, gamma: float, lam: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16), and the targets of the critic: (A_T, A_T + V_T).

    δ_t = R_t + γ V_{t'} - V_t and A_t = δ_t + γλ A_{t'}, t' the next trained token; V is 0 after the last.
    """
    advantages, returns = [0.0] * len(rewards_T), [0.0] * len(rewards_T)
    next_value = next_advantage = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        if not trained_T[t]:
            continue
        delta = _finite(rewards_T[t] + gamma * next_value - values_T[t])
        next_advantage = _finite(delta + gamma * lam * next_advantage)
        next_value = values_T[t]
        advantages[t], returns[t] = next_advantage, _finite(next_advantage + next_value)
    return tuple(advantages), tuple(returns)


def whiten(
    values_NT: Sequence[Sequence[float]], trained_NT: Sequence[Sequence[bool]], *, eps: float
) -> list[tuple[float, ...]]:
    """(x - mean) / sqrt(variance + eps) over the trained tokens of all responses, 0 elsewhere.

    The variance is the sample's (ddof 1), as in verl and TRL. Fewer than two tokens give zeros. Responses may differ in length.
    """
    masks = [np.asarray(row, dtype=bool) for row in trained_NT]
    rows = [np.asarray(row, dtype=np.float64) for row in values_NT]
    pool = np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)] or [np.empty(0)])
    if len(pool) < 2:
        return [(0.0,) * len(row) for row in rows]
    exponent = _exponent((float(np.abs(pool).max()),))
    scaled = np.ldexp(pool, -exponent)
    mean = scaled.mean()
    root = math.hypot(scaled.std(ddof=1), math.ldexp(math.sqrt(eps), -exponent))
    scale = root or 1.0  # 0 only if the values are huge and (nearly) equal: then x - mean is 0 too
    return [
        tuple(np.where(mask, (np.ldexp(row, -exponent) - mean) / scale, 0.0).tolist())
        for row, mask in zip(rows, masks, strict=True)
    ]


# --- numbers of any size ----------------------------------------------------------------------------------------------
# Squares of rewards above 1e154 would overflow, and so might sums: statistics are computed on rewards times a power of two,
# which is exact. Only a result beyond the range of float64 is cut, to the largest float64.
def _scored(rewards_G: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards_G if reward is not None]


def _equal(scored: Sequence[float]) -> bool:
    return len(scored) < 2 or max(scored) == min(scored)


def _exponent(values: Sequence[float]) -> int:
    """Return the smallest power of two, 0 or more, above all values."""
    return max(0, math.frexp(max(map(abs, values)))[1])


def _mean(scored: Sequence[float], exponent: int) -> float:
    return math.fsum(math.ldexp(reward, -exponent) for reward in scored) / len(scored)


def _grown(value: float, exponent: int) -> float:
    """Return value · 2^exponent, for |value| <= 2."""
    return _finite(4 * math.ldexp(value, exponent - 2))


def _finite(value: float) -> float:
    return max(-_LARGEST, min(_LARGEST, value))


def _each(rewards_G: Sequence[float | None], advantage: Callable[[float], float]) -> tuple[float, ...]:
    return tuple(0.0 if reward is None else advantage(reward) for reward in rewards_G)
