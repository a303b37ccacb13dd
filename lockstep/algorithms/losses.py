"""Policy losses: pure functions of a LossInput that return one loss per token, not averaged. Legend: T trained tokens, packed.

Each reports the same metrics of the ratio r = π_θ / π_old: its maximum, the maximum of |log r| before the cut, and the share of
tokens whose log r was cut at ±20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.kl import LOG_RATIO_CLAMP
from lockstep.algorithms.segments import per_sequence_mean
from lockstep.types import LossInput, LossOutput


def clipped_ratio(
    inputs: LossInput, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossOutput:
    """PPO's clipped surrogate: -min(r A, clip(r, 1 - low, 1 + high) A), r = π_θ / π_old of each token.

    Schulman et al., arXiv 1707.06347, eq. 7; also GRPO's (arXiv 2402.03300, eq. 3); with two different bounds DAPO's (arXiv
    2503.14476, eq. 10). With `dual_clip` c, tokens of negative advantage get -max(that minimum, c A) (Ye et al., arXiv
    1912.09729, eq. 5).
    """
    raw_T, ratio_T = _ratio(inputs)
    objective_T, stopped_T = _clipped(ratio_T, inputs.advantages_T, clip_low, clip_high)
    means = {"ratio/clip_share": stopped_T}
    if dual_clip is not None:
        floor_T = dual_clip * inputs.advantages_T
        cut_T = (inputs.advantages_T < 0) & (objective_T < floor_T)
        objective_T = torch.where(cut_T, floor_T, objective_T)
        means["ratio/dual_clip_share"] = cut_T.to(ratio_T.dtype)
    return LossOutput(-objective_T, means | _clamped(raw_T), _tails(raw_T, ratio_T))


def sequence_ratio(inputs: LossInput, *, clip_low: float, clip_high: float) -> LossOutput:
    """GSPO: -min(s A, clip(s, 1 - low, 1 + high) A), s_i = exp(mean of log r over the reply) (arXiv 2507.18071, eq. 5-7).

    In the paper's token form (eq. 13-14): s_it = sg(s_i) · π_θ / sg(π_θ), equal to s_i in value. The mean of a reply's token
    losses has the value and the gradient of its sequence loss, so that the aggregation seq-mean-token-mean equals the paper's
    loss.
    """
    raw_T, ratio_T = _ratio(inputs)
    mean_T = per_sequence_mean(raw_T.detach(), inputs.sequence_T, inputs.sequences)
    whole_T = mean_T.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    own_T = whole_T * (inputs.logprobs_T - inputs.logprobs_T.detach()).exp()
    objective_T, stopped_T = _clipped(own_T, inputs.advantages_T, clip_low, clip_high)
    means = {"ratio/clip_share": stopped_T} | _clamped(raw_T)
    return LossOutput(-objective_T, means, {"ratio/sequence_max": whole_T} | _tails(raw_T, ratio_T))


def bounded_weight(inputs: LossInput, *, weight_floor: float, weight_cap: float) -> LossOutput:
    """CISPO: -sg(clip(r, floor, cap)) A log π_θ, r = π_θ / π_old (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    The bound is on the ratio itself. Tokens beyond it keep their gradient, with the bound as weight.
    """
    raw_T, ratio_T = _ratio(inputs)
    weight_T = ratio_T.detach().clamp(weight_floor, weight_cap)
    with torch.no_grad():
        bounded_T = (weight_T != ratio_T).to(ratio_T.dtype)
    loss_T = -weight_T * inputs.advantages_T * inputs.logprobs_T
    return LossOutput(loss_T, {"ratio/bounded_share": bounded_T} | _clamped(raw_T), _tails(raw_T, ratio_T))


def reinforce(inputs: LossInput) -> LossOutput:
    """REINFORCE: -A log π_θ (Williams, 1992). The ratio is reported and has no part in the loss."""
    raw_T, ratio_T = _ratio(inputs)
    return LossOutput(-inputs.advantages_T * inputs.logprobs_T, _clamped(raw_T), _tails(raw_T, ratio_T))


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> Tensor:
    """Return the critic's loss: ½ max((V - R)², (V_old + clip(V - V_old, ±c) - R)²) per token, or ½ (V - R)² without a clip.

    This is the form of PPO's published code (see arXiv 2005.12729, §2). Beyond the clip a token's gradient stops, unless the
    value moved away from its return.
    """
    plain_T = (values_T - returns_T) ** 2
    if clip is None:
        return plain_T / 2
    near_T = torch.maximum(torch.minimum(values_T, old_values_T + clip), old_values_T - clip)
    return torch.maximum(plain_T, (near_T - returns_T) ** 2) / 2


def negative_log_likelihood(inputs: LossInput) -> LossOutput:
    """Return -log π_θ of each token of a given reply: supervised fine-tuning."""
    return LossOutput(-inputs.logprobs_T, {"sft/loss": -inputs.logprobs_T})


def _ratio(inputs: LossInput) -> tuple[Tensor, Tensor]:
    """Return log r before the cut, and r with log r in ±20, [T] each."""
    raw_T = inputs.logprobs_T - inputs.old_logprobs_T
    return raw_T, raw_T.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def _clipped(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r) A), and 1 for the tokens whose gradient the clip stopped."""
    plain_T, clipped_T = ratio_T * advantages_T, ratio_T.clamp(1 - low, 1 + high) * advantages_T
    with torch.no_grad():
        stopped_T = (clipped_T < plain_T).to(ratio_T.dtype)
    return torch.minimum(plain_T, clipped_T), stopped_T


def _clamped(raw_T: Tensor) -> dict[str, Tensor]:
    return {"ratio/clamped_share": (raw_T.detach().abs() > LOG_RATIO_CLAMP).to(raw_T.dtype)}


def _tails(raw_T: Tensor, ratio_T: Tensor) -> dict[str, Tensor]:
    return {"ratio/max": ratio_T.detach(), "ratio/log_abs_max": raw_T.detach().abs()}
