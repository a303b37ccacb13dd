"""From settings to an objective: every setting reaches the part that it is about, and each part says what it needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.build import Objective, build_objective
from lockstep.config.schema import Recipe
from lockstep.errors import LockstepError
from lockstep.types import LossInput, LossOutput
from tests.algorithms.replies import episode

TWO = (episode(0, 1.0, (True,), (0.5,), (0.25,)), episode(0, 0.0, (True, True), (0.0, 0.0), (0.25, 0.5)))
SEVERAL = {"update": {"samples_per_update": 16}}


def objective(algorithm: dict[str, Any] | None = None, **more: Any) -> Objective:
    return build_objective(Recipe.model_validate({"algorithm": {"kind": "grpo"} | (algorithm or {})} | more))


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs(*, ref: bool = True, kl_coef: float = 0.0) -> LossInput:
    """Three tokens, two sequences; ratios exp(0.3), exp(-0.4), 1; π_old / π_rollout exp(1), exp(-1), exp(0.5)."""
    logprobs_T = wide(-1.0, -2.0, -0.5).requires_grad_()
    old_T = logprobs_T.detach() - wide(0.3, -0.4, 0.0)
    return LossInput(
        logprobs_T,
        old_T,
        old_T - wide(1.0, -1.0, 0.5),
        wide(1.0, -1.0, 2.0),
        wide(0.7, 0.8, 0.9),
        torch.tensor([0, 0, 1]),
        2,
        wide(-1.5, -1.0, -0.6) if ref else None,
        kl_coef,
    )


RATIO = [math.exp(0.3), math.exp(-0.4), 1.0]
GAP = wide(0.5, -1.0, 0.1)


def loss_of(algorithm: dict[str, Any], **more: Any) -> list[float]:
    found: list[float] = objective(algorithm).loss(inputs(**more)).loss_T.tolist()
    return found


# --- credit and weights -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("algorithm", "first"),
    [
        ({}, 0.5 / (math.sqrt(0.5) + 1e-6)),
        ({"kind": "dr_grpo"}, 0.5),
        ({"kind": "gspo"}, 0.5 / (math.sqrt(0.5) + 1e-6)),
        ({"advantage": {"kind": "group", "std_ddof": 0, "std_eps": 0.5}}, 0.5),
        ({"kind": "rloo"}, 1.0),
        ({"kind": "max_rl"}, 0.5 / (0.5 + 1e-6)),
        ({"kind": "reinforce", "advantage": {"kind": "reward", "baseline": 0.75}}, 0.25),
        # token returns 0.5, 0, 0: mean 1/6, variance 1/12
        ({"kind": "reinforce_pp", "kl": {"coef": 0.1, "placement": "reward"}}, (1 / 3) / math.sqrt(1 / 12 + 1e-8)),
        # centred first: 0.5 - 0.5, -0.5, -0.5
        ({"kind": "reinforce_pp_baseline"}, (1 / 3) / math.sqrt(1 / 12 + 1e-8)),
        # 1 - 0.5 - 0.25 and A_t = -V: 0.25, -0.25, -0.5
        ({"kind": "ppo"}, (5 / 12) / math.sqrt(((5 / 12) ** 2 + (1 / 12) ** 2 + (1 / 3) ** 2) / 2 + 1e-8)),
        ({"kind": "ppo", "advantage": {"kind": "gae", "whiten": False}}, 0.25),
    ],
)
def test_settings_reach_the_advantages(algorithm: dict[str, Any], first: float):
    found = objective(algorithm).credit(TWO)
    assert found[0].advantages == pytest.approx((first,), rel=1e-9)
    assert len(found[1].advantages) == 2


def test_settings_reach_the_weights():
    assert objective().weights((2, 4), (0, 0)) == (1 / 4, 1 / 8)
    assert objective({"kind": "dapo"}).weights((2, 4), (0, 0)) == (1 / 6, 1 / 6)
    assert objective({"kind": "rloo"}).weights((2, 4), (0, 0)) == (1 / 2, 1 / 2)
    norm = objective({"kind": "dr_grpo"}, rollout={"max_tokens": 10})
    assert norm.weights((2, 4), (0, 0)) == (1 / 20, 1 / 20)


# --- losses -------------------------------------------------------------------------------------------------------------
SEQUENCE = [math.exp(-0.05), math.exp(-0.05), 1.0]
LOSSES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "clip": ({}, [-1.2, 0.8, -2.0]),
    "clip bounds": ({"loss": {"kind": "clip", "clip_low": 0.1, "clip_high": 0.5}}, [-RATIO[0], 0.9, -2.0]),
    "dapo": ({"kind": "dapo"}, [-1.28, 0.8, -2.0]),
    "gspo": ({"kind": "gspo"}, [-SEQUENCE[0], 0.9997, -2.0]),
    "gspo bounds": (
        {"loss": {"kind": "gspo", "clip_low": 0.3, "clip_high": 0.1}},
        [-SEQUENCE[0], SEQUENCE[1], -2.0],
    ),
    "cispo": ({"kind": "cispo"}, [RATIO[0], -2 * RATIO[1], 1.0]),
    "cispo bounds": (
        {"kind": "cispo", "loss": {"kind": "cispo", "weight_floor": 0.9, "weight_cap": 1.1}},
        [1.1, -1.8, 1.0],
    ),
    "reinforce": ({"kind": "reinforce"}, [1.0, -2.0, 1.0]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_settings_reach_the_loss(name: str):
    algorithm, expected = LOSSES[name]
    assert loss_of(algorithm) == pytest.approx(expected)


def test_the_dual_clip_reaches_the_loss():
    dual = {"loss": {"kind": "clip", "dual_clip": 1.5}}
    given = inputs()
    high = LossInput(given.logprobs_T, given.logprobs_T.detach() - 1, *_rest(given))
    assert objective(dual).loss(high).loss_T.tolist() == pytest.approx([-1.2, 1.5, -2.4])
    assert objective().loss(high).loss_T.tolist() == pytest.approx([-1.2, math.e, -2.4])


def _rest(given: LossInput) -> tuple[Any, ...]:
    return (given.rollout_logprobs_T, given.advantages_T, given.entropy_T, given.sequence_T, given.sequences)


CORRECTIONS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "tis": ({"kind": "tis"}, [2.0, math.exp(-1), math.exp(0.5)]),
    "tis cap": ({"kind": "tis", "cap": 1.0}, [1.0, math.exp(-1), 1.0]),
    "tis sequence": ({"kind": "tis", "level": "sequence"}, [1.0, 1.0, math.exp(0.5)]),
    "tis geometric": ({"kind": "tis", "level": "geometric", "cap": 1.25}, [1.0, 1.0, 1.25]),
    "mis": ({"kind": "mis"}, [math.e, 0.0, math.exp(0.5)]),
    "mis band": ({"kind": "mis", "low": 0.3, "high": 1.7, "weigh": False}, [0.0, 1.0, 1.0]),
    "mis sequence": ({"kind": "mis", "level": "sequence", "high": 1.5}, [1.0, 1.0, 0.0]),
    "mis geometric": ({"kind": "mis", "level": "geometric", "low": 0.9, "high": 1.1}, [1.0, 1.0, 0.0]),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_any_correction_multiplies_any_loss(name: str, loss: str):
    correction, weights = CORRECTIONS[name]
    algorithm, plain = LOSSES[loss]
    output = objective(algorithm | {"correction": correction}).loss(inputs())
    assert output.loss_T.tolist() == pytest.approx([w * x for w, x in zip(weights, plain, strict=True)])
    assert output.means["correction/weight_mean"].tolist() == pytest.approx(weights)


def gradient(output: LossOutput, given: LossInput) -> list[float]:
    (found_T,) = torch.autograd.grad(output.loss_T.sum(), given.logprobs_T)
    return found_T.tolist()


def test_penalty_and_bonus_are_not_corrected():
    algorithm = {"kl": {"coef": 0.1}, "entropy_coef": 0.05, "correction": {"kind": "mis"}}
    given = inputs(kl_coef=0.1)
    output = objective(algorithm).loss(given)
    penalty_T = 0.1 * ((-GAP).exp() - 1 + GAP)
    policy_T = wide(*CORRECTIONS["mis"][1]) * wide(*LOSSES["clip"][1])
    torch.testing.assert_close(output.loss_T.detach(), policy_T + penalty_T - 0.05 * given.entropy_T)


def test_the_loss_is_the_sum_of_its_terms():
    """With the controller's coefficient of the moment, not the one of the settings."""
    algorithm = {"kl": {"coef": 0.4}, "entropy_coef": 0.05}
    given = inputs(kl_coef=0.7)
    kl_T = (-GAP).exp() - 1 + GAP
    output = objective(algorithm).loss(given)
    policy_T = wide(*LOSSES["clip"][1])
    torch.testing.assert_close(output.loss_T.detach(), policy_T + 0.7 * kl_T - 0.05 * given.entropy_T)
    torch.testing.assert_close(output.means["kl/ref"].detach(), kl_T)
    torch.testing.assert_close(output.means["loss/kl"].detach(), 0.7 * kl_T)
    torch.testing.assert_close(output.means["loss/entropy"].detach(), -0.05 * given.entropy_T)
    ratio = {"ratio/clip_share", "ratio/clamped_share"}
    assert set(output.means) == {*ratio, "kl/ref", "loss/kl", "loss/entropy"}
    bare = objective().loss(given)
    torch.testing.assert_close(bare.loss_T.detach(), policy_T)
    assert set(bare.means) == ratio
    assert set(bare.maxima) == {"ratio/max", "ratio/log_abs_max"}


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_estimator_in_force_is_the_one_asked_for(estimator: str):
    found = objective({"kl": {"coef": 1.0, "estimator": estimator}}).loss(inputs()).means["kl/ref"].detach()
    torch.testing.assert_close(found, {"k2": GAP**2 / 2, "k3": (-GAP).exp() - 1 + GAP}[estimator])


def test_a_penalty_in_the_reward_is_not_in_the_loss_again():
    algorithm = {"kind": "reinforce_pp", "kl": {"coef": 1.0, "placement": "reward"}}
    assert loss_of(algorithm, kl_coef=1.0) == pytest.approx(LOSSES["clip"][1])
    assert loss_of(algorithm, ref=False) == pytest.approx(LOSSES["clip"][1])


def test_a_penalty_without_a_reference_is_an_error():
    """Left out in silence, the run would train something other than its formula."""
    with pytest.raises(LockstepError, match="reference"):
        objective({"kl": {"coef": 0.1}}).loss(inputs(ref=False))


def test_two_policies_take_the_ratio_to_the_engine():
    """Ratios exp(1.3), exp(-1.4) and exp(0.5) where the learner's own would be exp(0.3), exp(-0.4) and 1."""
    given = inputs()
    output = objective({"old_logprobs": "rollout", "loss": {"kind": "cispo"}}).loss(given)
    assert gradient(output, given) == pytest.approx([-math.exp(1.3), math.exp(-1.4), -2 * math.exp(0.5)])
    assert output.maxima["ratio/log_abs_max"].tolist() == pytest.approx([1.3, 1.4, 0.5])


# --- what it needs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("algorithm", "reference", "before_credit", "droppable"),
    [
        ({}, False, False, True),
        ({"kl": {"coef": 0.1}}, True, False, False),
        ({"kind": "reinforce_pp", "kl": {"coef": 0.1, "placement": "reward"}}, True, True, True),
        ({"kind": "reinforce_pp", "kl": {"coef": 0.0, "placement": "reward"}}, False, False, True),
        ({"entropy_coef": 0.1}, False, False, False),
        ({"kl": {"coef": 0.0, "estimator": "k1"}}, False, False, True),
        ({"correction": {"kind": "tis"}}, False, False, True),
        ({"kind": "ppo"}, False, False, False),
    ],
)
def test_what_an_objective_needs(algorithm: dict[str, Any], reference: bool, before_credit: bool, droppable: bool):
    made = objective(algorithm)
    assert made.needs_reference == reference
    assert made.reference_before_credit == before_credit
    assert made.zero_advantage_is_zero_gradient == droppable
    assert made.needs_values == (algorithm.get("kind") == "ppo")


@pytest.mark.parametrize(
    ("old", "more", "passes"),
    [
        ("auto", {}, False),
        ("auto", SEVERAL, True),
        ("auto", {"update": {"epochs": 2}}, True),
        ("recompute", {}, True),
        ("recompute", SEVERAL, True),
        ("rollout", {}, False),
        ("rollout", SEVERAL, False),
    ],
)
def test_old_logprobs_are_computed_exactly_when_they_are_needed(old: str, more: dict[str, Any], passes: bool):
    made = objective({"old_logprobs": old}, **more)
    assert made.recomputes_old == passes
    assert ("old-logprob pass" in made.formula) != passes


def test_every_kind_of_algorithm_can_be_built():
    kinds = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    kinds += ("ppo", "max_rl", "reinforce")
    for kind in kinds:
        made = objective({"kind": kind})
        assert all(math.isfinite(value) for one in made.credit(TWO) for value in one.advantages)
        assert made.loss(inputs()).loss_T.requires_grad
    assert len({objective({"kind": kind}).formula for kind in kinds}) == len(kinds)


def test_max_rl_is_refused_with_a_penalty_that_makes_rewards_negative():
    with pytest.raises(ValueError, match="max_rl divides by their mean"):
        objective({"kind": "max_rl", "overlong": {"buffer": 8}})
    objective({"kind": "max_rl", "overlong": {"drop_truncated": True}})
    objective({"kind": "max_rl", "overlong": {"buffer": 8, "penalty": 0}})


@pytest.mark.parametrize("kind", ["tis", "mis"])
def test_two_policies_weigh_the_whole_way_from_the_engine(kind: str):
    """REINFORCE has no ratio: with old_logprobs = rollout its weight is π_θ / π_rollout, here 0.8 and 3, whatever π_old is."""
    logs_T = torch.tensor([0.8, 3.0], dtype=torch.float64).log()
    new_T = (logs_T - 2).requires_grad_()
    zeros_T = torch.zeros(2, dtype=torch.float64)
    given = LossInput(new_T, zeros_T - 9, zeros_T - 2, zeros_T + 1, zeros_T, torch.tensor([0, 1]), 2)
    settings = {"kind": "tis", "cap": 2.0} if kind == "tis" else {"kind": "mis", "low": 0.5, "high": 2.0}
    made = objective({"old_logprobs": "rollout", "loss": {"kind": "reinforce"}, "correction": settings})
    (gradient_T,) = torch.autograd.grad(made.loss(given).loss_T.sum(), new_T)
    assert gradient_T.tolist() == pytest.approx([-0.8, -2.0 if kind == "tis" else 0.0])
    assert not made.recomputes_old
    assert "w = sg(π_θ) / π_rollout of the token" in made.formula
