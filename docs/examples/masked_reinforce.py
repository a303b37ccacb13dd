"""REINFORCE with a masked importance weight against the engine that sampled: two policies, a token-wise band (IcePop, MIS).

lockstep train recipes/algorithms/stale.yaml algorithm.loss=docs/examples/masked_reinforce.py:masked_reinforce
"""

import torch

from lockstep.types import LossInput, LossOutput


def masked_reinforce(inputs: LossInput, low: float = 0.5, high: float = 2.0) -> LossOutput:
    """-w A log π_θ per token, w = π_θ/π_rollout where low <= w <= high and 0 elsewhere, without a gradient through w."""
    with torch.no_grad():
        ratio_T = (inputs.logprobs_T - inputs.rollout_logprobs_T).clamp(-20, 20).exp()
        kept_T = ((ratio_T >= low) & (ratio_T <= high)).to(ratio_T.dtype)
    loss_T = -kept_T * ratio_T * inputs.advantages_T * inputs.logprobs_T
    return LossOutput(loss_T, {"correction/kept_share": kept_T}, {"ratio/max": ratio_T})
