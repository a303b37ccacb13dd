"""Weights of the rollout correction, and the statistics of the mismatch, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.algorithms.correction import Level, Mismatch, importance_weights, log_weights, measure_mismatch
from lockstep.config.correction import Mis, Tis
from lockstep.types import LossInput


def inputs_of(weights: list[list[float]], order: list[int] | None = None) -> LossInput:
    """Sequences of tokens with given w = π_old / π_rollout, packed end to end or in another order."""
    sequence = [number for number, row in enumerate(weights) for _ in row]
    flat = [w for row in weights for w in row]
    order = order or list(range(len(flat)))
    log_T = torch.tensor([math.log(flat[i]) for i in order], dtype=torch.float64)
    old_T = torch.full_like(log_T, -1.0)
    zeros_T = torch.zeros_like(log_T)
    sequence_T = torch.tensor([sequence[i] for i in order], dtype=torch.int64)
    return LossInput(old_T, old_T, old_T - log_T, zeros_T, zeros_T, sequence_T, len(weights))


def measured(inputs: LossInput) -> Mismatch:
    return Mismatch.read(inputs.old_logprobs_T.numel(), measure_mismatch(inputs).tolist())


ROWS = [[4.0, 0.5, 0.45], [1.5], [3.0, 3.0]]
SAMPLE = inputs_of(ROWS)
"""Products 0.9, 1.5 and 9; geometric means 0.9^(1/3), 1.5 and 3."""
ROOT = 0.9 ** (1 / 3)
RAW: dict[Level, list[float]] = {
    "token": [4.0, 0.5, 0.45, 1.5, 3.0, 3.0],
    "sequence": [0.9, 0.9, 0.9, 1.5, 9.0, 9.0],
    "geometric": [ROOT, ROOT, ROOT, 1.5, 3.0, 3.0],
}
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_each_level(level: Level):
    log_T = log_weights(SAMPLE.old_logprobs_T, SAMPLE.rollout_logprobs_T, SAMPLE.sequence_T, SAMPLE.sequences, level)
    assert log_T.exp().tolist() == pytest.approx(RAW[level])


@pytest.mark.parametrize("level", LEVELS)
def test_truncation(level: Level):
    found = importance_weights(SAMPLE, Tis(level=level, cap=2.0))
    assert found.weight_T.tolist() == pytest.approx([min(w, 2.0) for w in RAW[level]])
    assert found.means["correction/capped_share"].tolist() == [float(w > 2.0) for w in RAW[level]]
    assert found.means["correction/weight_mean"].tolist() == found.weight_T.tolist()
    assert found.maxima["correction/weight_max"].tolist() == pytest.approx(RAW[level])


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize(
    ("level", "low", "high"), [("token", 0.48, 3.5), ("sequence", 0.95, 8.0), ("geometric", 0.9, 1.1)]
)
def test_masking(level: Level, low: float, high: float, weigh: bool):
    found = importance_weights(SAMPLE, Mis(level=level, low=low, high=high, weigh=weigh))
    kept = [low <= w <= high for w in RAW[level]]
    assert found.means["correction/kept_share"].tolist() == [float(k) for k in kept]
    expected = [(w if weigh else 1.0) if k else 0.0 for w, k in zip(RAW[level], kept, strict=True)]
    assert found.weight_T.tolist() == pytest.approx(expected)
    assert 0 < sum(kept) < 6


def test_a_lopsided_band_keeps_w_and_not_its_inverse():
    sample = inputs_of([[0.21], [0.49], [0.51], [2.1], [4.9], [5.1]])
    found = importance_weights(sample, Mis(low=0.5, high=5.0, weigh=False))
    assert found.weight_T.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_the_bounds_are_kept():
    sample = inputs_of([[0.5], [2.0]])
    assert importance_weights(sample, Mis(low=0.5, high=2.0, weigh=False)).weight_T.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_weights_carry_no_gradient_and_do_not_depend_on_the_order(level: Level):
    """With one update a rollout π_old is sg(π_θ): nothing may flow through it even if it is handed over with gradient."""
    shuffled = inputs_of(ROWS, [5, 0, 3, 2, 4, 1])
    shuffled = replace(shuffled, old_logprobs_T=shuffled.old_logprobs_T.clone().requires_grad_())
    found = importance_weights(shuffled, Tis(level=level, cap=100.0))
    assert not found.weight_T.requires_grad
    assert found.weight_T.tolist() == pytest.approx([RAW[level][i] for i in (5, 0, 3, 2, 4, 1)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [-3000.0, 3000.0])
def test_absurd_gaps_stay_finite(level: Level, gap: float):
    zeros_T = torch.zeros(4)
    sample = LossInput(zeros_T, zeros_T, zeros_T - gap, zeros_T, zeros_T, torch.tensor([0, 0, 1, 1]), 2)
    settings: list[Tis | Mis] = [Tis(level=level, cap=1e30), Mis(level="token", low=0.0, high=1e30)]
    for one in settings:
        weight_T = importance_weights(sample, one).weight_T
        assert weight_T.tolist() == pytest.approx([math.exp(math.copysign(20, gap))] * 4, rel=1e-5)
    assert all(math.isfinite(value) for value in measured(sample).metrics().values())


# --- statistics -------------------------------------------------------------------------------------------------------
def test_the_mismatch_by_hand():
    """w of 2 and 1/2 in one reply, 1 in another: products 1 and 1."""
    metrics = measured(inputs_of([[2.0, 0.5], [1.0]])).metrics()
    log2 = math.log(2)
    assert metrics == pytest.approx(
        {
            "mismatch/k1": 0.0,
            "mismatch/k3": ((2 - 1 - log2) + (0.5 - 1 + log2)) / 3,
            "mismatch/mean_abs_dlogp": 2 * log2 / 3,
            "mismatch/max_abs_dlogp": log2,
            "mismatch/token_mult_prob_error": (2 + 2 + 1) / 3,
            "mismatch/max_weight": 2.0,
            "mismatch/ess_tokens": 3.5**2 / (3 * 5.25),
            "mismatch/ess_sequences": 1.0,
        }
    )


def test_k1_is_of_the_rollouts_divergence_and_signed():
    assert measured(inputs_of([[2.0]])).metrics()["mismatch/k1"] == pytest.approx(-math.log(2))


@pytest.mark.parametrize(("weights", "share"), [([5.0] * 4, 1.0), ([1.0, 1e-8, 1e-8, 1e-8], 0.25), ([3.0, 1.0], 0.8)])
def test_the_effective_sample_size(weights: list[float], share: float):
    """One weight that outgrows all others leaves one sample of four."""
    metrics = measured(inputs_of([[w] for w in weights])).metrics()
    assert metrics["mismatch/ess_tokens"] == pytest.approx(share, rel=1e-6)
    assert metrics["mismatch/ess_sequences"] == pytest.approx(share, rel=1e-6)


def test_estimates_have_no_bias():
    """Averaged over the rollout's own distribution, k1 and k3 are KL(π_rollout ‖ π_old) exactly."""
    generator = torch.Generator().manual_seed(0)
    rollout_V, old_V = (torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    divergence = float((rollout_V.exp() * (rollout_V - old_V)).sum())
    totals = {"mismatch/k1": 0.0, "mismatch/k3": 0.0}
    for place in range(9):
        metrics = measured(inputs_of([[math.exp(float(old_V[place] - rollout_V[place]))]])).metrics()
        for name in totals:
            totals[name] += float(rollout_V[place].exp()) * metrics[name]
    assert totals == pytest.approx(dict.fromkeys(totals, divergence))


def test_microbatches_add_up():
    apart = sum((measured(inputs_of([row])) for row in ROWS), Mismatch())
    assert apart.metrics() == pytest.approx(measured(SAMPLE).metrics())


def test_nothing_is_measured_of_nothing():
    """Sequences without tokens count in no effective sample size."""
    assert measured(inputs_of([[], []])).metrics() == Mismatch().metrics() == {}
    some = measured(inputs_of([[], [2.0], [2.0], []]))
    assert some.metrics()["mismatch/ess_sequences"] == pytest.approx(1.0)
