"""Metrics of an update: token-weighted means, maxima and percentiles over all its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.correction import NUMBERS, Mismatch, measure_mismatch
from lockstep.types import LossInput, LossOutput, Metrics, Scored, TokenIds


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


@dataclass(frozen=True, slots=True)
class _Kept:
    """Values of one micro-batch, or of half of one, on the device."""

    number: int
    processed: int
    sampled: bool
    """False for a supervised batch."""
    order: TokenIds
    logprobs_T: Tensor
    entropy_T: Tensor
    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    numbers_V: Tensor
    """Sums and maxima by these names, the loss, and the mismatch if it is sampled."""


class UpdateStatistics:
    """Collects per-token values of the micro-batches of one update. Nothing is read from the device before `pieces`."""

    def __init__(self) -> None:
        self._number = 0
        self._kept: list[_Kept] = []
        self.splits = 0
        """Micro-batches that were run in halves."""

    def begin(self, number: int) -> None:
        """Set the place in the update of the micro-batch that is added next."""
        self._number = number

    def add(self, inputs: LossInput, output: LossOutput, loss: Tensor | float, processed: int) -> None:
        """Add one micro-batch: its loss (already weighted) and the number of tokens that its forward pass processed.

        Nothing is stored before everything is computed: if memory runs out here, the micro-batch is run again by halves.
        """
        logprobs_T, entropy_T = inputs.logprobs_T.detach(), inputs.entropy_T.detach()
        sampled = bool(inputs.rollout_logprobs_T.numel())
        entropy = {"entropy/mean": entropy_T} if entropy_T.numel() else {}  # a supervised batch has none
        sums = {name: value_T.detach().double().sum() for name, value_T in {**entropy, **output.means}.items()}
        maxima = {name: value_T.detach().max().double() for name, value_T in output.maxima.items()}
        total = torch.as_tensor(loss, device=entropy_T.device).detach().double()
        numbers_V = torch.stack([*sums.values(), *maxima.values(), total])
        if sampled:
            numbers_V = torch.cat([numbers_V, measure_mismatch(inputs)])
        names = tuple(sums), tuple(maxima)
        kept = _Kept(self._number, processed, sampled, inputs.order, logprobs_T, entropy_T, *names, numbers_V)
        self._kept.append(kept)

    def pieces(self) -> tuple[Piece, ...]:
        """Return the values, read from the device in two copies: each waits for it."""
        if not self._kept:
            return ()
        numbers = iter(torch.cat([one.numbers_V for one in self._kept]).tolist())
        columns = [column_T for one in self._kept if one.sampled for column_T in (one.logprobs_T, one.entropy_T)]
        stored = iter(_stored(columns))
        found = []
        for one in self._kept:
            sums, maxima = dict(zip(one.sums, numbers, strict=False)), dict(zip(one.maxima, numbers, strict=False))
            loss, tokens = next(numbers), one.logprobs_T.numel()
            mismatch = Mismatch.read(tokens, list(islice(numbers, NUMBERS))) if one.sampled else None
            scored = Scored(one.order, next(stored), next(stored)) if one.sampled else Scored((), b"", b"")
            found.append(Piece(one.number, tokens, one.processed, loss, sums, maxima, mismatch, scored))
        return tuple(found)


def combine(pieces: Sequence[Piece]) -> Metrics:
    """Return the metrics of an update from all its pieces, summed in the order of the micro-batches: as named in docs/metrics.md.

    Without any token there are only the counts.
    """
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
        name: float(np.max([piece.maxima[name] for piece in pieces if name in piece.maxima]))  # NaN if one is
        for name in _names([piece.maxima for piece in pieces])
    }
    found = counts | means | maxima | {"loss/policy": sum(piece.loss for piece in pieces)}
    measured = [piece.mismatch for piece in pieces if piece.mismatch is not None]
    if not measured:
        return found
    entropy_T = torch.frombuffer(bytearray(b"".join(piece.scored.entropies for piece in pieces)), dtype=torch.float32)
    return found | sum(measured, Mismatch()).metrics() | _entropy_tails(entropy_T)


def _stored(columns: Sequence[Tensor]) -> list[bytes]:
    """Return tensors of one device as float32, after one copy of all."""
    if not columns:
        return []
    parts = torch.cat(list(columns)).float().cpu().split([column_T.numel() for column_T in columns])
    return [part_T.numpy().tobytes() for part_T in parts]


def _names(values: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for one in values for name in one))


def _values(pieces: Sequence[Piece], name: str) -> list[float]:
    return [piece.sums[name] for piece in pieces if name in piece.sums]


def _entropy_tails(entropy_T: Tensor) -> Metrics:
    p10, p90 = quantiles(entropy_T[:: max(1, entropy_T.numel() // 2**20)], (0.1, 0.9))
    return {"entropy/p10": p10, "entropy/p90": p90}


def quantiles(values_T: Tensor, shares: Sequence[float]) -> list[float]:
    """Return what torch.quantile does, to the last bit, of float32 values on the CPU: a selection instead of its sort."""
    last = values_T.numel() - 1
    ranks_Q = torch.tensor(shares) * last
    below_Q, above_Q = ranks_Q.long(), ranks_Q.ceil().long()
    placed_T = torch.from_numpy(np.partition(values_T.numpy(), [*below_Q.tolist(), *above_Q.tolist(), last]))
    if placed_T[last].isnan():  # NaN is placed last
        return [math.nan] * len(shares)
    found: list[float] = torch.lerp(placed_T[below_Q], placed_T[above_Q], ranks_Q - below_Q).tolist()
    return found
