"""Policy losses in float64: values by hand, gradients by finite differences on both sides of both bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.losses import LOG_RATIO_CLAMP, clipped_ratio, kl_penalty
from lockstep.types import LossInput, LossOutput

LOW, HIGH = 0.2, 0.3


def wide(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(ratios: list[float], advantages: list[float]) -> tuple[Tensor, LossOutput]:
    """The log-probabilities, as leaves, and the loss, for given ratios to the old policy."""
    old_T = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    logprobs_T = (old_T + wide(ratios).log()).requires_grad_()
    zeros_T = torch.zeros_like(old_T)
    given = LossInput(logprobs_T, old_T, zeros_T, wide(advantages), zeros_T, zeros_T.long(), 1)
    return logprobs_T, clipped_ratio(given, clip_low=LOW, clip_high=HIGH)


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
    assert output.maxima["ratio/max"].item() == pytest.approx(ratio)
    assert output.maxima["ratio/log_abs_max"].item() == pytest.approx(abs(math.log(ratio)))


def test_the_clipped_ratio_by_finite_differences():
    """A grid of ratios inside and outside both bounds, advantages of both signs; none within reach of a kink."""
    ratios = [r for r in torch.linspace(0.3, 2.0, 35).tolist() if min(abs(r - 0.8), abs(r - 1.3)) > 1e-3]
    for advantage in (-1.7, -0.2, 0.4, 2.5):
        logprobs_T, output = loss_of(ratios, [advantage] * len(ratios))
        (gradient_T,) = torch.autograd.grad(output.loss_T.sum(), logprobs_T)
        step = 1e-6
        up, down = (loss_of([r * math.exp(s) for r in ratios], [advantage] * len(ratios))[1] for s in (step, -step))
        torch.testing.assert_close(gradient_T, (up.loss_T - down.loss_T) / (2 * step), rtol=1e-7, atol=1e-8)
        # The definition, written out.
        for r, value in zip(ratios, output.loss_T.tolist(), strict=True):
            assert value == pytest.approx(-min(r * advantage, max(1 - LOW, min(1 + HIGH, r)) * advantage), rel=1e-9)


def test_at_the_first_update_the_gradient_is_the_plain_policy_gradient():
    logprobs_T, output = loss_of([1.0, 1.0, 1.0], [0.5, -1.0, 0.0])
    output.loss_T.sum().backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == [-0.5, 1.0, 0.0]


def test_losses_are_per_token_and_undivided():
    _, output = loss_of([1.0] * 7, [2.0] * 7)
    assert output.loss_T.tolist() == [-2.0] * 7


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
    assert float(output.maxima["ratio/max"].max()) == pytest.approx(math.exp(LOG_RATIO_CLAMP))


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
def test_kl_estimators(estimator: str, value, slope):  # type: ignore[no-untyped-def]
    gaps = [-1.5, -0.3, 0.0, 0.2, 2.0]
    ref_T = wide([-2.0] * 5)
    logprobs_T = (ref_T + wide(gaps)).requires_grad_()
    kl_T = kl_penalty(logprobs_T, ref_T, estimator)
    kl_T.sum().backward()
    assert kl_T.tolist() == pytest.approx([value(d) for d in gaps], rel=1e-12, abs=1e-15)
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx([slope(d) for d in gaps], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_estimate_the_divergence_without_bias(estimator: str):
    """Averaged over the policy's own distribution they are KL(policy ‖ reference) exactly."""
    generator = torch.Generator().manual_seed(0)
    policy_V = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(-1)
    reference_V = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    estimate = (policy_V.exp() * kl_penalty(policy_V, reference_V, estimator)).sum()
    torch.testing.assert_close(estimate, exact)


def test_k3_is_never_negative():
    gaps_T = torch.linspace(-18, 18, 1001, dtype=torch.float64)
    assert (kl_penalty(gaps_T, torch.zeros_like(gaps_T), "k3") >= 0).all()
