"""Metrics of an update: token-weighted means, maxima and percentiles over all its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from lockstep.algorithms.correction import Mismatch, measure_mismatch
from lockstep.types import LossInput, LossOutput, Metrics, Scored


@dataclass(frozen=True, slots=True)
class Piece:
    """Values of one micro-batch, or of half of one; plain numbers, so that another process can combine them."""

    number: int
    """Place of the micro-batch in the update."""
    tokens: int
    processed: int
    loss: float
    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    mismatch: Mismatch | None
    """None for a supervised batch."""
    scored: Scored
    """Empty for a supervised batch."""


class UpdateStatistics:
    """Collects per-token values of the micro-batches of one update. Nothing is read from the device before `pieces`."""

    def __init__(self) -> None:
        self._number = 0
        self._kept: list[tuple[int, LossInput, dict[str, Tensor], dict[str, Tensor], Tensor, int]] = []
        """Number, inputs without gradient, sums, maxima, loss and processed tokens of each."""

    def begin(self, number: int) -> None:
        """Set the place in the update of the micro-batch that is added next."""
        self._number = number

    def add(self, inputs: LossInput, output: LossOutput, loss: Tensor | float, processed: int) -> None:
        """Add one micro-batch: its loss (already weighted) and the number of tokens that its forward pass processed.

        Nothing is stored before everything is computed: if memory runs out here, the micro-batch is run again by halves.
        """
        inputs = replace(inputs, logprobs_T=inputs.logprobs_T.detach(), entropy_T=inputs.entropy_T.detach())
        entropy = {"entropy/mean": inputs.entropy_T} if inputs.entropy_T.numel() else {}  # a supervised batch has none
        sums = {name: value_T.detach().double().sum() for name, value_T in {**entropy, **output.means}.items()}
        maxima = {name: value_T.detach().max().double() for name, value_T in output.maxima.items()}
        total = torch.as_tensor(loss, device=inputs.entropy_T.device).detach().double()
        self._kept.append((self._number, inputs, sums, maxima, total, processed))

    def pieces(self) -> tuple[Piece, ...]:
        """Return the values, read from the device."""
        columns = [(*sums.values(), *maxima.values(), loss) for _, _, sums, maxima, loss, _ in self._kept]
        flat = iter(torch.stack([value for row in columns for value in row]).tolist() if columns else ())
        found = []
        for number, inputs, sums, maxima, _, processed in self._kept:
            means, largest = dict(zip(sums, flat, strict=False)), dict(zip(maxima, flat, strict=False))
            sampled = bool(inputs.rollout_logprobs_T.numel())
            scored = Scored((), b"", b"")
            if sampled:
                scored = Scored(inputs.order, _stored(inputs.logprobs_T), _stored(inputs.entropy_T))
            mismatch = measure_mismatch(inputs) if sampled else None
            tokens = inputs.logprobs_T.numel()
            found.append(Piece(number, tokens, processed, next(flat), means, largest, mismatch, scored))
        return tuple(found)

    def metrics(self) -> Metrics:
        """Return metrics as named in docs/metrics.md. Without any token there are only the counts."""
        return combine(self.pieces())


def combine(pieces: Sequence[Piece]) -> Metrics:
    """Return the metrics of an update from all its pieces, summed in the order of the micro-batches."""
    pieces = sorted(pieces, key=lambda piece: piece.number)
    tokens = sum(piece.tokens for piece in pieces)
    counts = {
        "batch/tokens_trained": float(tokens),
        "batch/tokens_processed": float(sum(piece.processed for piece in pieces)),
        "batch/microbatches": float(len(pieces)),
    }
    if not tokens:
        return counts
    means = {name: sum(_values(pieces, name)) / tokens for name in _names([piece.sums for piece in pieces])}
    maxima = {
        name: reduce(max, (piece.maxima[name] for piece in pieces if name in piece.maxima), -math.inf)
        for name in _names([piece.maxima for piece in pieces])
    }
    found = counts | means | maxima | {"loss/policy": sum(piece.loss for piece in pieces)}
    measured = [piece.mismatch for piece in pieces if piece.mismatch is not None]
    if not measured:
        return found
    entropy_T = torch.frombuffer(bytearray(b"".join(piece.scored.entropies for piece in pieces)), dtype=torch.float32)
    return found | sum(measured, Mismatch()).metrics() | _entropy_tails(entropy_T)


def _stored(values_T: Tensor) -> bytes:
    return values_T.float().cpu().numpy().tobytes()


def _names(values: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for one in values for name in one))


def _values(pieces: Sequence[Piece], name: str) -> list[float]:
    return [piece.sums[name] for piece in pieces if name in piece.sums]


def _entropy_tails(entropy_T: Tensor) -> Metrics:
    some_T = entropy_T[:: max(1, entropy_T.numel() // 2**20)]
    p10, p90 = torch.quantile(some_T, torch.tensor([0.1, 0.9])).tolist()
    return {"entropy/p10": p10, "entropy/p90": p90}
