"""Sums and means over the tokens of each sequence in a packed stream. Legend: T tokens, N sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def per_sequence_sum(values_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """Return sum of each sequence's tokens, [N]. Tokens of a sequence need not be adjacent."""
    return values_T.new_zeros(sequences).index_add(0, sequence_T, values_T)


def per_sequence_mean(values_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """Return the mean over each sequence's tokens, repeated for each of its tokens, [T]."""
    totals_N = per_sequence_sum(values_T, sequence_T, sequences)
    tokens_N = per_sequence_sum(torch.ones_like(values_T), sequence_T, sequences)
    return (totals_N / tokens_N.clamp(min=1)).index_select(0, sequence_T)
