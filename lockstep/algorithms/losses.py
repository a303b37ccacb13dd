"""Policy losses: pure functions of a LossInput, per token, undivided. Legend: T trained tokens, packed."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.types import LossInput, LossOutput

LOG_RATIO_CLAMP = 20.0
"""exp of more would overflow downstream; the raw value is logged beside."""


def clipped_ratio(inputs: LossInput, *, clip_low: float, clip_high: float) -> LossOutput:
    """PPO's clipped surrogate, to be minimised: -min(r A, clip(r, 1 - low, 1 + high) A), r = π_θ / π_old.

    Schulman et al., arXiv 1707.06347, eq. 7; GRPO uses it per token (arXiv 2402.03300, eq. 3).
    """
    raw_T = inputs.logprobs_T - inputs.old_logprobs_T
    ratio_T = raw_T.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    plain_T, clipped_T = ratio_T * inputs.advantages_T, bounded_T * inputs.advantages_T
    with torch.no_grad():
        stopped_T = (clipped_T < plain_T).to(ratio_T.dtype)
    return LossOutput(
        -torch.minimum(plain_T, clipped_T),
        means={"ratio/clip_share": stopped_T},
        maxima={"ratio/max": ratio_T, "ratio/log_abs_max": raw_T.abs()},
    )


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref): k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d with d = log π_θ - log π_ref.

    Schulman, joschu.net/blog/kl-approx.html; GRPO's is k3 (arXiv 2402.03300, eq. 4).
    """
    gap_T = (logprobs_T - ref_logprobs_T).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    if estimator == "k1":
        return gap_T
    return gap_T**2 / 2 if estimator == "k2" else (-gap_T).exp() - 1 + gap_T
