"""Samples one token from each row of logits, with one counter-based random number per row.

This number is a function of the sample's seed and the token's position alone, and no row's arithmetic depends on the others, so
a sample does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.types import Sampling

BLOCK = 256
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return one number in [0, 1) for each (seed, position), by splitmix64 (Steele, Lea & Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = np.asarray(seeds, dtype=np.uint64) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):  # two rounds: neighbouring seeds must not give related numbers
            x = x + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = (x ^ (x >> np.uint64(31))) & _MASK
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from each row; returns tokens_B (int64) and the log-probability of each under its sampling distribution.

    The distribution is softmax(logits / temperature), cut by top_k, top_p and min_p in that order and renormalised. At
    temperature 0 the most likely token is taken and its log-probability is the model's own, at temperature 1. `logits_BV` is
    fp32 and is overwritten. `uniform_B` is float64 in [0, 1).
    """
    if sampling.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, logits_BV.gather(-1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
    if sampling.temperature != 1:
        logits_BV /= sampling.temperature
    _cut(logits_BV, sampling)
    top_B = logits_BV.amax(-1)
    mass_BV = logits_BV.sub_(top_B[:, None]).exp_()
    tokens_B, total_B = _invert(mass_BV, uniform_B)
    return tokens_B, (mass_BV.gather(-1, tokens_B[:, None])[:, 0].double() / total_B).log().float()


def sample_rows(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, drawn_B: Tensor) -> tuple[Tensor, Tensor]:
    """Do `sample` without cuts, each row at its own temperature, with numbers drawn on the device from (seed, tokens drawn).

    `logits_BV` is fp32 and is overwritten; `seed_B` holds the bits of 64-bit seeds as int64.
    """
    greedy_B = temperature_B == 0
    logits_BV /= torch.where(greedy_B, 1.0, temperature_B)[:, None]
    best_B = logits_BV.argmax(-1)
    top_B = logits_BV.amax(-1)
    mass_BV = logits_BV.sub_(top_B[:, None]).exp_()
    drawn_token_B, total_B = _invert(mass_BV, uniforms_on(seed_B, drawn_B))
    tokens_B = torch.where(greedy_B, best_B, drawn_token_B)
    return tokens_B, (mass_BV.gather(-1, tokens_B[:, None])[:, 0].double() / total_B).log().float()


def uniforms_on(seed_B: Tensor, drawn_B: Tensor) -> Tensor:
    """Compute `uniforms` on the device of its arguments, with 64-bit arithmetic that wraps around."""
    x_B = seed_B + drawn_B.long() * _signed(0x9E3779B97F4A7C15)
    for _ in range(2):
        x_B = x_B + _signed(0x9E3779B97F4A7C15)
        x_B = (x_B ^ _shifted(x_B, 30)) * _signed(0xBF58476D1CE4E5B9)
        x_B = (x_B ^ _shifted(x_B, 27)) * _signed(0x94D049BB133111EB)
        x_B = x_B ^ _shifted(x_B, 31)
    return _shifted(x_B, 11).double() * 2.0**-53


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _shifted(x_B: Tensor, places: int) -> Tensor:
    """Shift logically to the right; int64 has only the arithmetic shift."""
    shifted_B: Tensor = (x_B >> places) & (2 ** (64 - places) - 1)
    return shifted_B


def _invert(mass_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token at which the running sum exceeds uniform × total: first the block of 256, then within it."""
    rows, vocabulary = mass_BV.shape
    blocks = -(-vocabulary // BLOCK)
    if vocabulary % BLOCK:
        mass_BV = torch.nn.functional.pad(mass_BV, (0, blocks * BLOCK - vocabulary))
    mass_BNK = mass_BV.view(rows, blocks, BLOCK)
    cumulative_BN = mass_BNK.sum(-1).double().cumsum(-1)
    total_B = cumulative_BN[:, -1]
    goal_B1 = (uniform_B * total_B)[:, None]
    block_B = (cumulative_BN <= goal_B1).sum(-1).clamp_(max=blocks - 1)
    row_B = torch.arange(rows, device=mass_BV.device)
    before_B = torch.where(block_B > 0, cumulative_BN[row_B, (block_B - 1).clamp(min=0)], 0.0)
    inside_BK = mass_BNK[row_B, block_B].double()
    offset_B = (inside_BK.cumsum(-1) <= goal_B1 - before_B[:, None]).sum(-1)
    # Rounding can carry the target past the block's end: take its last token with nonzero probability.
    last_B = BLOCK - 1 - (inside_BK > 0).flip(-1).to(torch.uint8).argmax(-1)
    return block_B * BLOCK + torch.minimum(offset_B, last_B), total_B


def _cut(logits_BV: Tensor, sampling: Sampling) -> None:
    vocabulary = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        least_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV.masked_fill_(logits_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probs_BV = ordered_BV.softmax(-1)
        beyond_BV = probs_BV.cumsum(-1) - probs_BV >= sampling.top_p
        logits_BV.masked_fill_(torch.zeros_like(beyond_BV).scatter_(-1, order_BV, beyond_BV), -torch.inf)
    if sampling.min_p > 0:
        least_B1 = logits_BV.amax(-1, keepdim=True) + float(np.log(sampling.min_p))
        logits_BV.masked_fill_(logits_BV < least_B1, -torch.inf)
