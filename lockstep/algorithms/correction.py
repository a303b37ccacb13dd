"""Rollout correction: importance weights for the difference between engine and learner, and measures of that difference.

w = π_old / π_rollout of each token, aggregated over its reply or not, with its logarithm limited to ±20. Legend: T trained
tokens, packed; N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.kl import LOG_RATIO_CLAMP
from lockstep.algorithms.segments import per_sequence_mean, per_sequence_sum
from lockstep.config.correction import Mis, Tis
from lockstep.types import LossInput, Metrics

Level: TypeAlias = Literal["token", "sequence", "geometric"]
NUMBERS = 11
"""Count of the numbers that measure a mismatch."""


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Factors on each token's policy loss, and metrics to log."""

    weight_T: Tensor
    """Constant: no gradient flows through it."""
    means: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def log_weights(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequence_T: Tensor, sequences: int, level: Level
) -> Tensor:
    """Return log w of each token, [T], in ±20 and without gradient: log π_old - log π_rollout, per token, summed over the
    reply, or averaged over it. At the two reply levels all tokens of a reply have the same value.
    """
    gap_T = (old_logprobs_T - rollout_logprobs_T).detach()
    match level:
        case "token":
            log_T = gap_T
        case "sequence":
            log_T = per_sequence_sum(gap_T, sequence_T, sequences).index_select(0, sequence_T)
        case "geometric":
            log_T = per_sequence_mean(gap_T, sequence_T, sequences)
        case _:
            assert_never(level)
    return log_T.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def importance_weights(inputs: LossInput, settings: Tis | Mis) -> ImportanceWeights:
    """Return the weight of each token's policy loss. KL and entropy terms are not multiplied by it.

    Tis: min(w, cap), so that tokens beyond the cap keep a gradient, unlike those beyond PPO's clip. Mis: w (or 1, without
    `weigh`) where low <= w <= high, 0 elsewhere; a token with weight 0 stays in every denominator, because the sequences'
    shares are fixed before the batch is split (verl removes it from the mask, and so divides by fewer).
    """
    log_T = log_weights(
        inputs.old_logprobs_T, inputs.rollout_logprobs_T, inputs.sequence_T, inputs.sequences, settings.level
    )
    raw_T = log_T.exp()
    match settings:
        case Tis():
            weight_T = raw_T.clamp(max=settings.cap)
            share = {"correction/capped_share": (raw_T > settings.cap).to(raw_T.dtype)}
        case Mis():
            kept_T = ((raw_T >= settings.low) & (raw_T <= settings.high)).to(raw_T.dtype)
            weight_T = kept_T * raw_T if settings.weigh else kept_T
            share = {"correction/kept_share": kept_T}
        case _:
            assert_never(settings)
    return ImportanceWeights(weight_T, {"correction/weight_mean": weight_T} | share, {"correction/weight_max": raw_T})


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Difference between engine and learner over some tokens, as sums: those of micro-batches add up to those of the update."""

    tokens: int = 0
    sequences: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums of the per-token values that are reported as means, by metric name."""
    largest_gap: float = 0.0
    """Largest |log w|, not clamped."""
    largest_weight: float = 0.0
    token_weights: tuple[float, float] = (0.0, 0.0)
    """Σ w and Σ w² over tokens."""
    sequence_weights: tuple[float, float] = (0.0, 0.0)
    """Σ w and Σ w² over sequences, w being the product over the tokens of one."""

    @staticmethod
    def read(tokens: int, numbers: Sequence[float]) -> Mismatch:
        """Return what `measure_mismatch` measured over this many tokens."""
        k1, k3, gap, error, gap_max, weight_max, w, ww, s, ss, present = numbers
        sums = {
            "mismatch/k1": k1,
            "mismatch/k3": k3,
            "mismatch/mean_abs_dlogp": gap,
            "mismatch/token_mult_prob_error": error,
        }
        return Mismatch(tokens, int(present), sums, gap_max, weight_max, (w, ww), (s, ss))

    def __add__(self, other: Mismatch) -> Mismatch:
        names = {**self.sums, **other.sums}
        return Mismatch(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names},
            float(np.maximum(self.largest_gap, other.largest_gap)),  # NaN if one is: max() would lose it
            float(np.maximum(self.largest_weight, other.largest_weight)),
            _pairwise(self.token_weights, other.token_weights),
            _pairwise(self.sequence_weights, other.sequence_weights),
        )

    def metrics(self) -> Metrics:
        """Return metrics of docs/metrics.md; nothing without tokens. The share of effective samples is (Σ w)² / (N Σ w²)."""
        if not self.tokens:
            return {}
        return {name: total / self.tokens for name, total in self.sums.items()} | {
            "mismatch/max_abs_dlogp": self.largest_gap,
            "mismatch/max_weight": self.largest_weight,
            "mismatch/ess_tokens": _effective(self.token_weights, self.tokens),
            "mismatch/ess_sequences": _effective(self.sequence_weights, self.sequences),
        }


def measure_mismatch(inputs: LossInput) -> Tensor:
    """Measure how far π_old is from π_rollout over the trained tokens, whether or not it is corrected; `Mismatch.read` reads it.

    k1 = log π_rollout - log π_old estimates KL(π_rollout ‖ π_old), k3 = w - 1 - log w the same with less variance;
    token_mult_prob_error is the mean of exp |log w|. Weights have their logarithm in ±20. Nothing is read from the device.
    """
    gap_T = (inputs.old_logprobs_T - inputs.rollout_logprobs_T).detach().double()
    if not gap_T.numel():
        return gap_T.new_zeros(NUMBERS)
    log_T = gap_T.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    log_N = per_sequence_sum(gap_T, inputs.sequence_T, inputs.sequences).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    weight_T = log_T.exp()
    present_N = per_sequence_sum(torch.ones_like(gap_T), inputs.sequence_T, inputs.sequences) > 0
    weight_N = log_N.exp() * present_N
    numbers = [
        -gap_T.sum(), (torch.expm1(log_T) - log_T).sum(), gap_T.abs().sum(), log_T.abs().exp().sum(),
        gap_T.abs().max(), weight_T.max(), weight_T.sum(), (weight_T**2).sum(),
        weight_N.sum(), (weight_N**2).sum(), present_N.sum().double(),
    ]  # fmt: skip
    return torch.stack(numbers)


def _effective(weights: tuple[float, float], count: int) -> float:
    total, squares = weights
    return total**2 / (count * squares)


def _pairwise(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]
