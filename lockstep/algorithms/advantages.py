"""Advantages: from the rewards of a group to one number per sample. Pure functions; float64; no NaN for any input.

Legend: G samples of one prompt. An unscored sample (reward None) has advantage 0 and takes no part in its group's statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_relative(
    rewards_G: Sequence[float | None], *, divide_by_std: bool, std_eps: float, std_ddof: int
) -> tuple[float, ...]:
    """GRPO: A_i = (r_i - mean(r)) / (std(r) + eps), or without the division (DeepSeekMath, arXiv 2402.03300, eq. 3 and §4.1.2).

    A group whose scored rewards are all equal, or that has fewer than two, gives zeros.
    """
    scored = [reward for reward in rewards_G if reward is not None]
    if len(scored) < 2 or max(scored) == min(scored):
        return (0.0,) * len(rewards_G)
    mean = math.fsum(scored) / len(scored)
    scale = 1.0
    if divide_by_std:
        variance = math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - std_ddof)
        scale = math.sqrt(variance) + std_eps
    return tuple(0.0 if reward is None else (reward - mean) / scale for reward in rewards_G)
