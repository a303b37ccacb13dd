"""Policy losses in float64: values by hand, gradients by finite differences on both sides of both bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.kl import LOG_RATIO_CLAMP
from lockstep.algorithms.losses import bounded_weight, clipped_ratio, reinforce, sequence_ratio, value_loss
from lockstep.types import LossInput, LossOutput

LOW, HIGH = 0.2, 0.3


def wide(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(ratios: list[float], advantages: list[float], sequence: list[int] | None = None) -> LossInput:
    """Tokens of given ratios to the old policy; their log-probabilities are leaves. All of one sequence, or as told."""
    old_T = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    logprobs_T = (old_T + wide(ratios).log()).requires_grad_()
    zeros_T, sequence_T = torch.zeros_like(old_T), torch.tensor(sequence or [0] * len(ratios))
    return LossInput(logprobs_T, old_T, zeros_T, wide(advantages), zeros_T, sequence_T, int(sequence_T.max()) + 1)


def loss_of(ratios: list[float], advantages: list[float]) -> tuple[Tensor, LossOutput]:
    given = inputs_of(ratios, advantages)
    return given.logprobs_T, clipped_ratio(given, clip_low=LOW, clip_high=HIGH)


def gradient_of(given: LossInput, output: LossOutput) -> list[float]:
    (gradient_T,) = torch.autograd.grad(output.loss_T.sum(), given.logprobs_T)
    return gradient_T.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.0, -2.0, 2.0, 2.0, 0.0),
        (0.9, 2.0, -1.8, -1.8, 0.0),
        (1.2, -2.0, 2.4, 2.4, 0.0),
        # beyond a bound, in the direction that the advantage asks for: constant
        (1.5, 2.0, -2.6, 0.0, 1.0),
        (0.5, -2.0, 1.6, 0.0, 1.0),
        # beyond a bound, against it: still pulled back
        (1.5, -2.0, 3.0, 3.0, 0.0),
        (0.5, 2.0, -1.0, -1.0, 0.0),
        # no advantage, no gradient
        (1.5, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_ratio_by_hand(ratio: float, advantage: float, value: float, slope: float, clipped: float):
    logprobs_T, output = loss_of([ratio], [advantage])
    output.loss_T.sum().backward()
    assert output.loss_T.item() == pytest.approx(value, rel=1e-12)
    assert logprobs_T.grad is not None
    assert float(logprobs_T.grad) == pytest.approx(slope, rel=1e-12, abs=1e-15)
    assert float(output.means["ratio/clip_share"]) == clipped
    assert float(output.means["ratio/clamped_share"]) == 0.0
    assert output.maxima["ratio/max"].item() == pytest.approx(ratio)
    assert output.maxima["ratio/log_abs_max"].item() == pytest.approx(abs(math.log(ratio)))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_absurd_ratios_stay_finite_and_are_reported_as_they_are(advantage: float):
    old_T, far_T = wide([-1.0, -2000.0]), wide([-2000.0, -1.0]).requires_grad_()
    zeros_T = torch.zeros(2, dtype=torch.float64)
    given = LossInput(far_T, old_T, zeros_T, wide([advantage] * 2), zeros_T, zeros_T.long(), 1)
    output = clipped_ratio(given, clip_low=LOW, clip_high=HIGH)
    output.loss_T.sum().backward()
    assert far_T.grad is not None
    assert output.loss_T.isfinite().all()
    assert far_T.grad.isfinite().all()
    assert output.maxima["ratio/log_abs_max"].tolist() == [1999.0, 1999.0]
    assert output.means["ratio/clamped_share"].tolist() == [1.0, 1.0]
    assert float(output.maxima["ratio/max"].max()) == pytest.approx(math.exp(LOG_RATIO_CLAMP))


# --- dual clip ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "cut"),
    [
        (2.9, -1.0, 2.9, 2.9, 0.0),
        (3.1, -1.0, 3.0, 0.0, 1.0),
        (50.0, -2.0, 6.0, 0.0, 1.0),
        (50.0, 2.0, -2.6, 0.0, 0.0),  # a positive advantage has its own bound, and no floor
        (0.1, -1.0, 0.8, 0.0, 0.0),
    ],
)
def test_the_dual_clip_by_hand(ratio: float, advantage: float, value: float, slope: float, cut: float):
    given = inputs_of([ratio], [advantage])
    output = clipped_ratio(given, clip_low=LOW, clip_high=HIGH, dual_clip=3.0)
    assert output.loss_T.item() == pytest.approx(value)
    assert gradient_of(given, output) == pytest.approx([slope], abs=1e-15)
    assert float(output.means["ratio/dual_clip_share"]) == cut


def test_without_a_dual_clip_nothing_is_reported_of_it():
    assert "ratio/dual_clip_share" not in loss_of([1.0], [1.0])[1].means


# --- GSPO -----------------------------------------------------------------------------------------------------------------
def test_the_sequence_ratio_by_hand():
    """Ratios 4 and 1 have the geometric mean 2; 0.25, 1 and 4 have 1. Sequences need not be packed end to end."""
    given = inputs_of([4.0, 0.25, 1.0, 1.0, 4.0], [1.0, -2.0, 1.0, -2.0, -2.0], [0, 1, 0, 1, 1])
    output = sequence_ratio(given, clip_low=0.5, clip_high=1.5)
    assert output.loss_T.tolist() == pytest.approx([-2.0, 2.0, -2.0, 2.0, 2.0])
    # s is the slope of every token of its sequence: the mean over the tokens is d(-s A) / d log π_t = -s A / |o|
    assert gradient_of(given, output) == pytest.approx([-2.0, 2.0, -2.0, 2.0, 2.0])
    assert output.maxima["ratio/sequence_max"].tolist() == pytest.approx([2.0, 1.0, 2.0, 1.0, 1.0])
    assert output.maxima["ratio/max"].tolist() == pytest.approx([4.0, 0.25, 1.0, 1.0, 4.0])


@pytest.mark.parametrize(
    ("ratios", "advantage", "value", "slope"),
    [
        ([4.0, 1.0], 1.0, -1.5, 0.0),  # 2 is beyond 1.5: both tokens stop, the one of ratio 1 too
        ([4.0, 1.0], -1.0, 2.0, 2.0),
        ([0.25, 1.0], -1.0, 0.75, 0.0),
        ([0.25, 1.0], 1.0, -0.5, -0.5),
        ([4.0, 0.25], 1.0, -1.0, -1.0),  # far apart, and together where they were
    ],
)
def test_a_sequence_is_clipped_as_a_whole(ratios: list[float], advantage: float, value: float, slope: float):
    given = inputs_of(ratios, [advantage] * 2)
    output = sequence_ratio(given, clip_low=0.25, clip_high=0.5)
    assert output.loss_T.tolist() == pytest.approx([value] * 2)
    assert gradient_of(given, output) == pytest.approx([slope] * 2, abs=1e-15)
    assert output.means["ratio/clip_share"].tolist() == [float(slope == 0.0)] * 2


# --- CISPO and REINFORCE ----------------------------------------------------------------------------------------------
def test_bounded_weights_by_hand():
    given = inputs_of([0.1, 0.5, 1.0, 3.0, 9.0], [2.0, 2.0, -1.0, 1.0, -1.0])
    output = bounded_weight(given, weight_floor=0.25, weight_cap=5.0)
    weights = [0.25, 0.5, 1.0, 3.0, 5.0]
    slopes = [-w * a for w, a in zip(weights, given.advantages_T.tolist(), strict=True)]
    assert output.loss_T.tolist() == pytest.approx(
        [s * x for s, x in zip(slopes, given.logprobs_T.tolist(), strict=True)]
    )
    assert gradient_of(given, output) == pytest.approx(slopes)  # no token loses its gradient
    assert output.means["ratio/bounded_share"].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_reinforce_by_hand():
    given = inputs_of([1.0, 7.0, 0.2], [2.0, -1.0, 0.0])
    output = reinforce(given)
    logprobs = given.logprobs_T.tolist()
    assert output.loss_T.tolist() == pytest.approx([-2 * logprobs[0], logprobs[1], 0.0])
    assert gradient_of(given, output) == [-2.0, 1.0, 0.0]
    assert output.maxima["ratio/max"].tolist() == pytest.approx([1.0, 7.0, 0.2])


# --- the critic's loss ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (0.5, 0.5, 1.0, 0.125, -0.5),
        (0.65, 0.5, 1.0, 0.35**2 / 2, -0.35),  # inside the band
        (0.9, 0.5, 1.0, 0.3**2 / 2, 0.0),  # ahead of the band, on its way to the target: stopped at 0.7
        (0.1, 0.5, 1.0, 0.9**2 / 2, -0.9),  # behind the band: pulled back
        (2.0, 0.5, 0.0, 2.0, 2.0),
        (-0.5, 0.5, 0.0, 0.125, -0.5),  # past the band and past the target
    ],
)
def test_the_value_loss_by_hand(value: float, old: float, target: float, loss: float, slope: float):
    values_T = wide([value]).requires_grad_()
    loss_T = value_loss(values_T, wide([old]), wide([target]), 0.2)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), values_T)
    assert loss_T.item() == pytest.approx(loss)
    assert float(gradient_T) == pytest.approx(slope, abs=1e-15)
