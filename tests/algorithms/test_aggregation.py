"""Weights of sequences: the weighted sum of token losses is the mean that each mode names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.aggregation import Mode, sequence_weights

Losses = Sequence[Sequence[float]]
MAX = 50


def token_mean(losses: Losses, prompts: Sequence[int]) -> float:
    return fmean(value for row in losses for value in row)


def seq_mean_token_mean(losses: Losses, prompts: Sequence[int]) -> float:
    return fmean(fmean(row) for row in losses if row)


def seq_mean_token_sum(losses: Losses, prompts: Sequence[int]) -> float:
    return fmean(math.fsum(row) for row in losses if row)


def seq_mean_token_sum_norm(losses: Losses, prompts: Sequence[int]) -> float:
    return fmean(math.fsum(row) / MAX for row in losses if row)


def prompt_mean(losses: Losses, prompts: Sequence[int]) -> float:
    pooled = [
        [value for row, own in zip(losses, prompts, strict=True) if own == prompt for value in row]
        for prompt in sorted(set(prompts))
    ]
    return fmean(fmean(values) for values in pooled if values)


MODES: dict[Mode, Callable[[Losses, Sequence[int]], float]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "prompt-mean": prompt_mean,
}


def aggregated(losses: Losses, prompts: Sequence[int], mode: Mode) -> float:
    weights = sequence_weights([len(row) for row in losses], prompts, mode, MAX)
    assert len(weights) == len(losses)
    return math.fsum(weight * math.fsum(row) for weight, row in zip(weights, losses, strict=True))


@pytest.mark.parametrize("mode", MODES)
@given(
    losses=st.lists(st.lists(st.floats(-10, 10), max_size=9), min_size=1, max_size=9),
    prompts=st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_every_mode_is_the_mean_it_names(mode: Mode, losses: Losses, prompts: list[int]):
    own = prompts[: len(losses)]
    if any(losses):
        assert aggregated(losses, own, mode) == pytest.approx(MODES[mode](losses, own), abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences_have_no_weight_and_no_say(mode: Mode):
    assert sequence_weights((4, 0, 2), (0, 0, 1), mode, MAX)[::2] == sequence_weights((4, 2), (0, 1), mode, MAX)
    assert sequence_weights((0, 0), (0, 1), mode, MAX) == (0.0, 0.0)
    assert sequence_weights((), (), mode, MAX) == ()
