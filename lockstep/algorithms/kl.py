"""KL divergence from the reference model: per-token estimates, penalties in the reward, and the controller of its weight.

Legend: T trained tokens, packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

Estimator: TypeAlias = Literal["k1", "k2", "k3"]

LOG_RATIO_CLAMP = 20.0
"""Bound on |log-ratio|: a larger exp is of no use as a weight and would overflow downstream."""

CONTROLLER_CLIP = 0.2


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: Estimator) -> Tensor:
    """Return the per-token estimate of KL(π_θ ‖ π_ref): k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d with d = log π_θ - log π_ref in
    ±20.

    Schulman, joschu.net/blog/kl-approx.html; GRPO uses k3 (arXiv 2402.03300, eq. 4). As a term of a loss on the policy's own
    samples, the expected gradient of k1 is 0, that of k2 is KL(π_θ ‖ π_ref)'s, and that of k3 is KL(π_ref ‖ π_θ)'s.
    """
    gap_T = (logprobs_T - ref_logprobs_T).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    match estimator:
        case "k1":
            return gap_T
        case "k2":
            return gap_T**2 / 2
        case "k3":
            return torch.expm1(-gap_T) + gap_T
        case _:
            assert_never(estimator)


def reward_penalties(
    logprobs_T: Sequence[float],
    ref_logprobs_T: Sequence[float],
    trained_T: Sequence[bool],
    *,
    estimator: Estimator,
    coef: float,
) -> tuple[float, ...]:
    """Return the amount to subtract from each token's reward: coef · estimate, 0 where not trained (arXiv 2203.02155, §3.5).

    Lists are per response token; the policy is the one that sampled (π_old). For TrainSequence.penalties.
    """
    policy, reference = (torch.tensor(values, dtype=torch.float64) for values in (logprobs_T, ref_logprobs_T))
    estimates = kl_penalty(policy, reference, estimator).tolist()
    return tuple(coef * value if trained else 0.0 for value, trained in zip(estimates, trained_T, strict=True))


def adapted_coef(coef: float, *, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the controller's next coefficient: coef · (1 + clip(kl / target - 1, ±0.2) · samples / horizon).

    Ziegler et al., arXiv 1909.08593, §2.2. `kl` is the step's mean k1 per trained token, `samples` the number of its samples. A
    horizon shorter than the step counts as the step: otherwise the coefficient could become negative. A divergence that is not
    a number leaves the coefficient as it is; the update with it is skipped, and counted, by the optimizer.
    """
    if math.isnan(kl):
        return coef
    error = max(-CONTROLLER_CLIP, min(CONTROLLER_CLIP, kl / target - 1))
    return coef * (1 + error * min(samples / horizon, 1))
