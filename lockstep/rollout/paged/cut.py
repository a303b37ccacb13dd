"""Draws tokens with top_k, top_p or min_p: these sort the vocabulary, and so run outside the captured CUDA graph.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.rollout.paged.scheduler import Running
from lockstep.rollout.paged.state import Rows
from lockstep.rollout.sampler import sample, uniforms
from lockstep.types import Sampling


def cuts(sampling: Sampling) -> bool:
    """Return whether these settings remove tokens."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


@torch.no_grad()
def draw_cut(sequences: Sequence[Running], logits_BV: Tensor, rows: Rows) -> None:
    """Draw the next token of each sequence into the rows, one kind of sampling after the other."""
    drawn, device = rows.drawn_B[: len(sequences)].tolist(), logits_BV.device
    kinds: dict[Sampling, list[int]] = {}
    for row, sequence in enumerate(sequences):
        kinds.setdefault(sequence.request.sampling, []).append(row)
    for sampling, places in kinds.items():
        numbers = uniforms([sequences[row].request.seed for row in places], [drawn[row] for row in places])
        place_B = torch.tensor(places, device=device)
        uniform_B = torch.from_numpy(numbers).to(device)
        token_B, logprob_B = sample(logits_BV[place_B].float(), sampling, uniform_B)
        rows.token_B[place_B], rows.logprob_B[place_B] = token_B, logprob_B
