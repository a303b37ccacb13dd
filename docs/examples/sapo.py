"""Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate on the ratio in the place of PPO's clip.

lockstep train recipes/quickstart.yaml update.samples_per_update=60 algorithm.loss=docs/examples/sapo.py:sapo
"""

import torch

from lockstep.types import LossInput, LossOutput


def sapo(inputs: LossInput, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossOutput:
    """-σ(τ (r - 1)) · 4/τ · A per token, r = π_θ/π_old; at r = 1 its gradient is that of r A."""
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    ratio_T = log_ratio_T.clamp(-20, 20).exp()
    tau_T = torch.full_like(ratio_T, tau_neg).masked_fill(inputs.advantages_T > 0, tau_pos)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return LossOutput(-gate_T * inputs.advantages_T, maxima={"ratio/max": ratio_T.detach()})
