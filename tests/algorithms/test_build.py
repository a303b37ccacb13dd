"""From settings to an objective: every number in force acts, and stands in the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep.algorithms.build import Objective, build_objective
from lockstep.config.schema import Recipe
from lockstep.errors import LockstepError
from lockstep.types import LossInput


def recipe(algorithm: dict[str, Any] | None = None, **more: Any) -> Recipe:
    return Recipe.model_validate({"algorithm": algorithm or {}} | more)


def objective(algorithm: dict[str, Any] | None = None, **more: Any) -> Objective:
    return build_objective(recipe(algorithm, **more))


DEFAULT = recipe()

CHANGES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no std": ({"algorithm": {"divide_by_std": False}}, ("A_i = (r_i - mean(r)),",)),
    "std_eps": ({"algorithm": {"std_eps": 0.003}}, ("0.003",)),
    "std_ddof": ({"algorithm": {"std_ddof": 0}}, ("ddof=0",)),
    "clip_low": ({"algorithm": {"clip_low": 0.17}}, ("0.83", "1.2")),
    "clip_high": ({"algorithm": {"clip_high": 0.28}}, ("0.8", "1.28")),
    "kl": ({"algorithm": {"kl": {"coef": 0.04}}}, ("0.04", "k3", "π_ref")),
    "kl estimator": ({"algorithm": {"kl": {"coef": 0.04, "estimator": "k2"}}}, ("0.04", "k2")),
    "entropy": ({"algorithm": {"entropy_coef": 0.0125}}, ("0.0125", "H_t")),
    "token-mean": ({"algorithm": {"aggregation": "token-mean"}}, ("1/Σ_i|o_i| Σ_i Σ_t",)),
    "token-sum": ({"algorithm": {"aggregation": "seq-mean-token-sum"}}, ("1/N Σ_i Σ_t",)),
    "sum-norm": (
        {"algorithm": {"aggregation": "seq-mean-token-sum-norm"}, "rollout": {"max_tokens": 77}},
        ("1/N Σ_i 1/77 Σ_t",),
    ),
    "prompt-mean": ({"algorithm": {"aggregation": "prompt-mean"}}, ("1/P Σ_p",)),
    "samples": ({"samples_per_prompt": 16}, ("the 16 samples", "N = 128")),
    "prompts": ({"prompts_per_step": 3}, ("N = 24",)),
    "updates": ({"update": {"samples_per_update": 16}}, ("N = 16", "the 4 updates", "π_old")),
    "epochs": ({"update": {"epochs": 3}}, ("the 3 updates", "π_old")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_formula_holds_the_numbers_in_force(change: str):
    settings, parts = CHANGES[change]
    formula = build_objective(Recipe.model_validate(settings)).formula
    for part in parts:
        assert part in formula
    assert formula != build_objective(DEFAULT).formula


def test_all_settings_give_different_formulas():
    formulas = [build_objective(Recipe.model_validate(settings)).formula for settings, _ in CHANGES.values()]
    assert len({*formulas, build_objective(DEFAULT).formula}) == len(CHANGES) + 1


def test_the_default_formula():
    assert build_objective(DEFAULT).formula.splitlines() == [
        "L = 1/N Σ_i 1/|o_i| Σ_t [ -min(r_t A_i, clip(r_t, 0.8, 1.2) A_i) ]",
        "A_i = (r_i - mean(r)) / (std(r, ddof=1) + 1e-06), over the 8 samples of a prompt",
        "r_t = π_θ / sg(π_θ): one update per rollout, the ratio is 1 by construction and its old-logprob pass is skipped",
        "N = 64 samples per update; no KL term and no reference model",
    ]


def test_settings_reach_the_advantages_and_the_weights():
    assert objective({"divide_by_std": False}).advantages((1.0, 0.0)) == (0.5, -0.5)
    assert objective({"std_ddof": 0, "std_eps": 0.5}).advantages((1.0, 0.0)) == (0.5, -0.5)
    assert objective({"std_ddof": 1, "std_eps": 0.5}).advantages((1.0, 0.0))[0] == pytest.approx(
        0.5 / (math.sqrt(0.5) + 0.5)
    )
    assert objective().weights((2, 4), (0, 0)) == (1 / 4, 1 / 8)
    assert objective({"aggregation": "token-mean"}).weights((2, 4), (0, 0)) == (1 / 6, 1 / 6)
    norm = objective({"aggregation": "seq-mean-token-sum-norm"}, rollout={"max_tokens": 10})
    assert norm.weights((2, 4), (0, 0)) == (1 / 20, 1 / 20)


def inputs(ref: bool = True) -> LossInput:
    def wide(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    logprobs_T = wide(-1.0, -2.0, -0.5).requires_grad_()
    old_T = logprobs_T.detach() - wide(0.3, -0.4, 0.0)
    return LossInput(
        logprobs_T,
        old_T,
        old_T,
        wide(1.0, -1.0, 2.0),
        wide(0.7, 0.8, 0.9),
        torch.zeros(3, dtype=torch.int64),
        1,
        wide(-1.5, -1.0, -0.6) if ref else None,
    )


def test_the_loss_is_the_sum_of_its_terms():
    given = inputs()
    policy = -torch.tensor([min(math.exp(0.3), 1.25), -max(math.exp(-0.4), 0.9), 2.0], dtype=torch.float64)
    gap_T = torch.tensor([0.5, -1.0, 0.1], dtype=torch.float64)
    kl_T = (-gap_T).exp() - 1 + gap_T
    settings = {"clip_low": 0.1, "clip_high": 0.25, "kl": {"coef": 0.4}, "entropy_coef": 0.05}
    output = objective(settings).loss(given)
    torch.testing.assert_close(output.loss_T.detach(), policy + 0.4 * kl_T - 0.05 * given.entropy_T)
    torch.testing.assert_close(output.means["kl/ref"].detach(), kl_T)
    torch.testing.assert_close(output.means["loss/kl"].detach(), 0.4 * kl_T)
    torch.testing.assert_close(output.means["loss/entropy"].detach(), -0.05 * given.entropy_T)
    assert set(output.means) == {"ratio/clip_share", "kl/ref", "loss/kl", "loss/entropy"}
    bare = objective({"clip_low": 0.1, "clip_high": 0.25}).loss(given)
    torch.testing.assert_close(bare.loss_T.detach(), policy)
    assert set(bare.means) == {"ratio/clip_share"}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_estimator_in_force_is_the_one_asked_for(estimator: str):
    kl_T = objective({"kl": {"coef": 1.0, "estimator": estimator}}).loss(inputs()).means["kl/ref"].detach()
    gap_T = torch.tensor([0.5, -1.0, 0.1], dtype=torch.float64)
    expected = {"k1": gap_T, "k2": gap_T**2 / 2, "k3": (-gap_T).exp() - 1 + gap_T}[estimator]
    torch.testing.assert_close(kl_T, expected)


def test_a_penalty_without_a_reference_is_an_error():
    """Left out in silence, the run would train something other than its formula."""
    with pytest.raises(LockstepError, match="reference"):
        objective({"kl": {"coef": 0.1}}).loss(inputs(ref=False))


@pytest.mark.parametrize(
    ("algorithm", "reference", "droppable"),
    [
        ({}, False, True),
        ({"kl": {"coef": 0.1}}, True, False),
        ({"entropy_coef": 0.1}, False, False),
        ({"kl": {"coef": 0.0, "estimator": "k1"}}, False, True),
    ],
)
def test_what_an_objective_needs(algorithm: dict[str, Any], reference: bool, droppable: bool):
    made = objective(algorithm)
    assert (made.needs_reference, made.zero_advantage_is_zero_gradient) == (reference, droppable)
