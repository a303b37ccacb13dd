"""Estimates of the divergence, their gradients, penalties in the reward, and the controller: numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lockstep.algorithms.kl import Estimator, adapted_coef, kl_penalty


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
def test_estimators(estimator: Estimator, value: Callable[[float], float], slope: Callable[[float], float]):
    gaps = (-1.5, -0.3, 0.0, 0.2, 2.0)
    ref_T = wide(*[-2.0] * 5)
    logprobs_T = (ref_T + wide(*gaps)).requires_grad_()
    kl_T = kl_penalty(logprobs_T, ref_T, estimator)
    kl_T.sum().backward()
    assert kl_T.tolist() == pytest.approx([value(d) for d in gaps], rel=1e-12, abs=1e-15)
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx([slope(d) for d in gaps], rel=1e-12, abs=1e-15)


def exact(policy_V: torch.Tensor, reference_V: torch.Tensor) -> torch.Tensor:
    return (policy_V.exp() * (policy_V - reference_V)).sum()


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(2))
    return first.requires_grad_(), second.log_softmax(-1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_estimate_the_divergence_without_bias(estimator: Estimator):
    """Averaged over the policy's own distribution they are KL(policy ‖ reference) exactly."""
    logits_V, reference_V = distributions()
    policy_V = logits_V.log_softmax(-1).detach()
    estimate = (policy_V.exp() * kl_penalty(policy_V, reference_V, estimator)).sum()
    torch.testing.assert_close(estimate, exact(policy_V, reference_V))


def test_gradients_in_a_loss_are_those_that_the_docstring_names():
    """In expectation over the policy's samples: k1's is 0, k2's is KL(π ‖ ref)'s, k3's is KL(ref ‖ π)'s."""
    logits_V, reference_V = distributions()
    policy_V = logits_V.log_softmax(-1)
    chance_V = policy_V.detach().exp()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(value, logits_V, retain_graph=True)
        return found

    found: dict[Estimator, torch.Tensor] = {
        name: gradient((chance_V * kl_penalty(policy_V, reference_V, name)).sum()) for name in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(found["k1"], torch.zeros(20, dtype=torch.float64))
    torch.testing.assert_close(found["k2"], gradient(exact(policy_V, reference_V)))
    torch.testing.assert_close(found["k3"], gradient(exact(reference_V, policy_V)))


def test_k3_is_never_negative_and_precise_near_0():
    gaps_T = torch.linspace(-18, 18, 1001, dtype=torch.float64)
    assert (kl_penalty(gaps_T, torch.zeros_like(gaps_T), "k3") >= 0).all()
    tiny_T = kl_penalty(torch.tensor([1e-3]), torch.tensor([0.0]), "k3")  # fp32: d²/2 - d³/6
    assert float(tiny_T) == pytest.approx(5e-7, rel=0.1)


@pytest.mark.parametrize(("estimator", "value"), [("k1", -20.0), ("k2", 200.0), ("k3", math.exp(20) - 21)])
def test_absurd_gaps_are_cut_at_20(estimator: Estimator, value: float):
    assert float(kl_penalty(wide(-5000.0), wide(-1.0), estimator)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 64 / 1000)),
        (0.2, 0.5 * (1 + 0.2 * 64 / 1000)),  # the error is cut at 0.2
        (50.0, 0.5 * (1 + 0.2 * 64 / 1000)),
        (math.inf, 0.5 * (1 + 0.2 * 64 / 1000)),
        (0.09, 0.5 * (1 - 0.1 * 64 / 1000)),
        (-3.0, 0.5 * (1 - 0.2 * 64 / 1000)),  # k1 may be negative
        (math.nan, 0.5),
    ],
)
def test_the_controller(kl: float, expected: float):
    assert adapted_coef(0.5, kl=kl, target=0.1, samples=64, horizon=1000) == pytest.approx(expected, rel=1e-12)


def test_a_step_longer_than_the_horizon_cannot_turn_the_penalty_round():
    assert adapted_coef(0.5, kl=0.0, target=0.1, samples=1000, horizon=10) == pytest.approx(0.4)


def test_the_controller_comes_to_its_target():
    """A policy whose divergence is inverse to the coefficient is held at the target."""
    coef = 5.0
    for _ in range(2000):
        coef = adapted_coef(coef, kl=0.02 / coef, target=0.1, samples=64, horizon=1000)
    assert 0.02 / coef == pytest.approx(0.1, rel=1e-3)
