"""Metrics of an update: token-weighted means, maxima and percentiles over all its micro-batches."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from lockstep.algorithms.correction import Mismatch, measure_mismatch
from lockstep.types import LossInput, LossOutput, Metrics


class UpdateStatistics:
    """Collects per-token values of the micro-batches of one update. Nothing is read from the device before `metrics`."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = defaultdict(list)
        self._maxima: dict[str, list[Tensor]] = defaultdict(list)
        self._losses: list[Tensor] = []
        self._inputs: list[LossInput] = []
        """Inputs without gradient, for entropies and mismatch."""
        self._tokens, self._processed = 0, 0

    def add(self, inputs: LossInput, output: LossOutput, loss: Tensor | float, processed: int) -> None:
        """Add one micro-batch: its loss (already weighted) and the number of tokens that its forward pass processed.

        Nothing is stored before everything is computed: if memory runs out here, the micro-batch is run again by halves.
        """
        inputs = replace(inputs, logprobs_T=inputs.logprobs_T.detach(), entropy_T=inputs.entropy_T.detach())
        entropy = {"entropy/mean": inputs.entropy_T} if inputs.entropy_T.numel() else {}  # a supervised batch has none
        sums = {name: value_T.detach().double().sum() for name, value_T in {**entropy, **output.means}.items()}
        maxima = {name: value_T.detach().max().double() for name, value_T in output.maxima.items()}
        self._losses.append(torch.as_tensor(loss, device=inputs.entropy_T.device).detach().double())
        for name, value in sums.items():
            self._sums[name].append(value)
        for name, value in maxima.items():
            self._maxima[name].append(value)
        self._inputs.append(inputs)
        self._tokens += inputs.logprobs_T.numel()
        self._processed += processed

    def metrics(self) -> Metrics:
        """Return metrics as named in docs/metrics.md. Without any token there are only the counts."""
        counts = {
            "batch/tokens_trained": float(self._tokens),
            "batch/tokens_processed": float(self._processed),
            "batch/microbatches": float(len(self._inputs)),
        }
        if not self._tokens:
            return counts
        means = {name: sum(_read(values)) / self._tokens for name, values in self._sums.items()}
        maxima = {name: reduce(max, _read(values), -math.inf) for name, values in self._maxima.items()}
        found = counts | means | maxima | {"loss/policy": sum(_read(self._losses))}
        sampled = [inputs for inputs in self._inputs if inputs.rollout_logprobs_T.numel()]
        if not sampled:
            return found
        mismatch = sum((measure_mismatch(inputs) for inputs in sampled), Mismatch())
        return found | mismatch.metrics() | _entropy_tails(torch.cat([inputs.entropy_T for inputs in sampled]).float())


def _entropy_tails(entropy_T: Tensor) -> Metrics:
    some_T = entropy_T[:: max(1, entropy_T.numel() // 2**20)]
    p10, p90 = torch.quantile(some_T, torch.tensor([0.1, 0.9], device=entropy_T.device)).tolist()
    return {"entropy/p10": p10, "entropy/p90": p90}


def _read(values: list[Tensor]) -> list[float]:
    numbers: list[float] = torch.stack(values).tolist()
    return numbers
