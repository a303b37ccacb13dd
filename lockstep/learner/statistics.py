"""What an update reports: token-weighted means, maxima and percentiles over all its micro-batches."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from lockstep.types import LossInput, LossOutput, Metrics


class UpdateStatistics:
    """Collects per-token values of the micro-batches of one update."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = defaultdict(lambda: -math.inf)
        self._entropies: list[Tensor] = []
        self._tokens, self._processed, self._microbatches, self._loss = 0, 0, 0, 0.0

    def add(self, inputs: LossInput, output: LossOutput, loss: float, processed: int) -> None:
        """One micro-batch: its loss (already weighted) and the tokens that its forward pass processed."""
        with torch.no_grad():
            gap_T = inputs.logprobs_T.detach() - inputs.rollout_logprobs_T
            means = {
                "entropy/mean": inputs.entropy_T.detach(),
                "mismatch/mean_abs_dlogp": gap_T.abs(),
                "mismatch/k3": (-gap_T).exp() - 1 + gap_T,
                "mismatch/token_mult_prob_error": gap_T.abs().exp(),
                **output.means,
            }
            for name, value_T in means.items():
                self._sums[name] += float(value_T.detach().double().sum())
            for name, value_T in {"mismatch/max_abs_dlogp": gap_T.abs(), **output.maxima}.items():
                self._maxima[name] = max(self._maxima[name], float(value_T.detach().max()))
            self._entropies.append(inputs.entropy_T.detach())
        self._tokens += inputs.logprobs_T.numel()
        self._processed += processed
        self._microbatches += 1
        self._loss += loss

    def metrics(self) -> Metrics:
        """Names as in docs/metrics.md. Without any token there is nothing to report but the counts."""
        counts = {
            "batch/tokens_trained": float(self._tokens),
            "batch/tokens_processed": float(self._processed),
            "batch/microbatches": float(self._microbatches),
        }
        if not self._tokens:
            return counts
        entropy_T = torch.cat(self._entropies).float()
        p10, p90 = torch.quantile(
            entropy_T[:: max(1, entropy_T.numel() // 2**20)], torch.tensor([0.1, 0.9], device=entropy_T.device)
        ).tolist()
        means = {name: total / self._tokens for name, total in self._sums.items()}
        tails = {"entropy/p10": p10, "entropy/p90": p90, "loss/policy": self._loss}
        return counts | means | dict(self._maxima) | tails
