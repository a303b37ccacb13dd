"""TRL 1.16's own code on the same numbers: where it computes what we do the two agree; every known difference is a test.

TRL's functions run as they are (see trl_trainers.py). Sequences have 1 to 6 tokens, some of them tool output.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.algorithms.build import Objective, build_objective
from lockstep.types import LossInput
from tests.algorithms.ragged import MAX_TOKENS, recipe
from tests.algorithms.replies import episode

pytest.importorskip("trl", reason="TRL comes with the extra `dev`")

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.rloo_config import RLOOConfig

from tests.algorithms.trl_trainers import Grpo, Rloo, Rows, padded

LENGTHS = (3, 1, 4, 2, 6, 5)
SEEDS = (0, 1, 2)
assert_same = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def rows(seed: int, spread: float = 0.5, *, holes: bool = True) -> Rows:
    """Six sequences with log-ratios of this spread, so that bounds are passed on both sides."""
    rng = np.random.default_rng(seed)

    def numbers() -> Tensor:
        return torch.tensor(rng.normal(size=(len(LENGTHS), max(LENGTHS))))

    mask = padded([[float(not (holes and n > 2 and place == 1)) for place in range(n)] for n in LENGTHS])
    logprobs = -numbers().abs() - 0.5
    old = logprobs + spread * numbers()
    rollout = (old + spread * numbers()).float().double()  # TRL takes the engine's log-probabilities as float32
    ref = logprobs + spread * numbers()
    advantages = torch.tensor(rng.normal(size=len(LENGTHS)))
    return Rows(LENGTHS, mask, logprobs.requires_grad_(), old, rollout, ref, numbers().abs(), advantages)


def objective(**algorithm: Any) -> Objective:
    return build_objective(recipe(algorithm))


def ours(given: Rows, found: Objective, kl_coef: float = 0.0) -> Tensor:
    """Our loss of the batch, from the trained tokens packed end to end."""
    kept = given.mask_NT.bool()
    lengths = kept.sum(1).tolist()
    owner = torch.arange(len(lengths)).repeat_interleave(kept.sum(1))
    inputs = LossInput(
        given.logprobs_NT[kept],
        given.old_NT[kept],
        given.rollout_NT[kept],
        given.advantages_N[owner],
        given.entropy_NT[kept],
        owner,
        len(lengths),
        given.ref_NT[kept],
        kl_coef,
    )
    weights = torch.tensor(found.weights(lengths, [i // 3 for i in range(len(lengths))]), dtype=torch.float64)
    return (weights[owner] * found.loss(inputs).loss_T).sum()


def same(given: Rows, theirs: Tensor, own: Tensor) -> None:
    """Value and gradient in every log-probability."""
    assert_same(own, theirs)
    gradients = [torch.autograd.grad(value, given.logprobs_NT)[0] for value in (own, theirs)]
    assert gradients[0].abs().max() > 0
    assert_same(*gradients)


def advantages(rewards: list[float | None], size: int, **algorithm: Any) -> list[float]:
    """Ours, one token a reply."""
    episodes = [episode(i // size, reward, (True,)) for i, reward in enumerate(rewards)]
    return [credit.advantages[0] for credit in objective(**algorithm).credit(episodes)]


# --- agreement --------------------------------------------------------------------------------------------------------
GROUPS: list[list[float | None]] = [
    [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
    [0.3, -0.7, 2.5, 1.0, 1.0, 1.0],
    [1.0, None, 0.0, None, None, 1.0],
    [None, None, None, 0.5, 0.25, None],
]


@pytest.mark.parametrize("rewards", GROUPS)
def test_advantages_agree(rewards: list[float | None]):
    given = rows(0)
    with_eps = {"kind": "group", "std_eps": 1e-4}
    pairs: list[tuple[Grpo | Rloo, dict[str, Any]]] = [
        (Grpo(given), {"kind": "grpo", "advantage": with_eps}),
        (Grpo(given, scale_rewards="none"), {"kind": "dr_grpo"}),
        (Rloo(given), {"kind": "rloo"}),
    ]
    for trainer, algorithm in pairs:
        assert advantages(rewards, 3, **algorithm) == pytest.approx(trainer.advantages(rewards, 3), abs=1e-12)


CLIP = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"kind": "grpo"}),
    "bnpo": ({"loss_type": "bnpo"}, {"kind": "grpo", "aggregation": "token-mean"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"kind": "dapo"}),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": MAX_TOKENS}, {"kind": "dr_grpo"}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"kind": "cispo", "loss": {"kind": "cispo", "weight_cap": 1.3}},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        {"kind": "gspo"},
    ),
    "wide gspo, token mean": (
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon_low": 0.3, "epsilon_high": 0.3},
        {"kind": "gspo", "loss": {"kind": "gspo", "clip_low": 0.3, "clip_high": 0.3}, "aggregation": "token-mean"},
    ),
    "delta is dual clip": (
        {"loss_type": "grpo", "delta": 1.4},
        {"kind": "grpo", "loss": {"kind": "clip", "dual_clip": 1.4}},
    ),
    "k3 in the loss": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        {"kind": "grpo", "kl": {"coef": 0.04}},
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_agree(name: str, seed: int):
    theirs, algorithm = LOSSES[name]
    given = rows(seed)
    same(given, Grpo(given, **theirs).loss(), ours(given, objective(**algorithm), theirs.get("beta", 0.0)))


CORRECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token_truncate": ({}, {"kind": "tis", "level": "token", "cap": 1.5}),
    "sequence_truncate": ({}, {"kind": "tis", "level": "sequence", "cap": 1.5}),
    "token_mask": ({}, {"kind": "mis", "level": "token", "low": 0.0, "high": 1.5}),
    "token_mask with a lower bound": (
        {"vllm_importance_sampling_clip_min": 0.6},
        {"kind": "mis", "level": "token", "low": 0.6, "high": 1.5},
    ),
    "sequence_mask": ({}, {"kind": "mis", "level": "sequence", "low": 0.0, "high": 1.5}),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_agree(name: str, seed: int):
    """The weight multiplies the policy's term and leaves the penalty alone, in both."""
    more, correction = CORRECTIONS[name]
    given = rows(seed)
    mode = name.split()[0]
    bounds = {"vllm_importance_sampling_clip_max": 1.5, "vllm_importance_sampling_mode": mode} | more
    trainer = Grpo(given, beta=0.04, use_bias_correction_kl=False, **bounds)
    algorithm = {"kind": "grpo", "aggregation": "token-mean", "correction": correction, "kl": {"coef": 0.04}}
    same(given, trainer.loss(trainer.correction()), ours(given, objective(**algorithm), 0.04))


def test_rloo_agrees_at_its_first_update():
    """With π_θ = π_old TRL's clipped ratio of the reply has the gradient of A · log π."""
    first = rows(0, holes=False)
    given = replace(first, old_NT=first.logprobs_NT.detach())
    theirs, own = Rloo(given).loss(), ours(given, objective(kind="rloo"))
    gradients = [torch.autograd.grad(value, given.logprobs_NT)[0] for value in (own, theirs)]
    assert_same(*gradients)


# --- differences ------------------------------------------------------------------------------------------------------
def default(name: str) -> Any:
    return next(field.default for field in fields(GRPOConfig) if field.name == name)


def test_difference_defaults():
    """`GRPOTrainer` means token mean and corrects by default; our grpo is the paper's mean and corrects nothing unasked."""
    assert default("loss_type") == "dapo"
    assert recipe({}).algorithm.aggregation == "seq-mean-token-mean"
    assert (default("vllm_importance_sampling_correction"), default("vllm_importance_sampling_mode")) == (
        True,
        "sequence_mask",
    )
    assert default("vllm_importance_sampling_clip_max") == 3.0
    assert recipe({}).algorithm.correction.kind == "none"
    assert default("beta") == recipe({}).algorithm.kl.coef == 0.0
    assert default("epsilon") == 0.2
    rloo = {field.name: field.default for field in fields(RLOOConfig)}
    assert rloo["beta"] == 0.05, "TRL's RLOO penalises the divergence unasked"
    assert recipe({"kind": "rloo"}).algorithm.kl.coef == 0.0


def test_difference_epsilon_of_the_deviation():
    """TRL adds 1e-4 to the deviation, we 1e-6: advantages of 0-1 rewards are 0.02 % smaller there.

    Its factor G / (G - 1) is a float32 (`nanstd` divides integers), hence the tolerance.
    """
    rewards: list[float | None] = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    theirs, own = Grpo(rows(0)).advantages(rewards, 6), advantages(rewards, 6, kind="grpo")
    deviation = math.sqrt(0.3)
    assert own[0] / theirs[0] == pytest.approx((deviation + 1e-4) / (deviation + 1e-6), rel=1e-7)
    assert own[0] / theirs[0] - 1 == pytest.approx(1.81e-4, rel=0.01)


def test_difference_population_deviation():
    """TRL's is the sample deviation alone; std_ddof = 0 gives advantages sqrt(G / (G - 1)) times as large."""
    rewards: list[float | None] = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    own = advantages(rewards, 6, advantage={"kind": "group", "std_ddof": 0, "std_eps": 1e-4})
    assert own[0] / Grpo(rows(0)).advantages(rewards, 6)[0] == pytest.approx(math.sqrt(6 / 5), rel=1e-4)


def test_difference_equal_rewards():
    """A mean of equal numbers may be off by a rounding: TRL then has advantages of 1e-13, we none at all."""
    rewards: list[float | None] = [0.1] * 6
    assert 0 < max(map(abs, Grpo(rows(0)).advantages(rewards, 6))) < 1e-12
    assert advantages(rewards, 6, kind="grpo") == [0.0] * 6


def test_difference_scaling_by_the_batch():
    """scale_rewards = batch divides by the deviation of all rewards. Ours divides by the group's or not at all."""
    rewards: list[float | None] = [1.0, 0.0, 0.0, 5.0, 5.0, 2.0]
    theirs = Grpo(rows(0), scale_rewards="batch").advantages(rewards, 3)
    everywhere = float(np.std(rewards, ddof=1)) + 1e-4  # type: ignore[arg-type]
    assert theirs == pytest.approx([x / everywhere for x in advantages(rewards, 3, kind="dr_grpo")])


@pytest.mark.parametrize(("loss_type", "kind"), [("grpo", "grpo"), ("dr_grpo", "dr_grpo")])
def test_difference_sequences_without_a_token(loss_type: str, kind: str):
    """TRL counts a wholly masked reply in the denominator, we do not: with one of six masked its loss is 5/6 of ours."""
    given = rows(0)
    given = replace(given, mask_NT=given.mask_NT * torch.tensor([[1.0], [1.0], [0.0], [1.0], [1.0], [1.0]]))
    theirs = Grpo(given, loss_type=loss_type, max_completion_length=MAX_TOKENS).loss()
    assert_same(theirs, ours(given, objective(kind=kind)) * 5 / 6)


def part(given: Rows, chosen: slice) -> Rows:
    tensors = {f.name: getattr(given, f.name)[chosen] for f in fields(given) if f.name != "lengths"}
    return Rows(given.lengths[chosen], **tensors)


def test_difference_micro_batches_of_bnpo():
    """TRL's bnpo divides by the tokens of each micro-batch; its dapo and our token-mean by those of the whole batch."""
    given = rows(0)
    halves = [part(given, slice(0, 3)), part(given, slice(3, 6))]
    theirs = sum(Grpo(half, loss_type="bnpo", current_gradient_accumulation_steps=2).loss() for half in halves)
    whole = ours(given, objective(kind="grpo", aggregation="token-mean"))
    tokens = [float(half.mask_NT.sum()) for half in halves]
    means = [ours(half, objective(kind="grpo", aggregation="token-mean")) for half in halves]
    assert_same(theirs, (means[0] + means[1]) / 2)
    assert_same(whole, (tokens[0] * means[0] + tokens[1] * means[1]) / sum(tokens))
    assert abs((theirs / whole).item() - 1) > 0.05


def far(gap: float) -> Rows:
    """One token whose log-ratios to all other policies are `gap`."""
    at = torch.full((1, 1), -30.0 + gap, dtype=torch.float64)
    low = at - gap
    one = torch.ones(1, dtype=torch.float64)
    return Rows((1,), torch.ones_like(at), at.requires_grad_(), low, low, low, torch.zeros_like(low), -one)


def test_difference_ratios_beyond_any_use():
    """We take log-ratios within ±20, TRL as they are: a token at 25 nats weighs e^25 there and e^20 here."""
    given = far(25.0)
    theirs, own = Grpo(given, loss_type="grpo").loss(), ours(given, objective(kind="grpo"))
    assert (theirs.item(), own.item()) == pytest.approx((math.exp(25), math.exp(20)), rel=1e-12)


def test_difference_divergence_beyond_any_use():
    """So also in k3: at d = -25 TRL's is e^25 and ours e^20."""
    given = replace(far(-25.0), advantages_N=torch.zeros(1, dtype=torch.float64))
    theirs = Grpo(given, loss_type="grpo", beta=1.0, use_bias_correction_kl=False).loss()
    own = ours(given, objective(kind="grpo", kl={"coef": 1.0}), 1.0)
    assert (theirs.item(), own.item()) == pytest.approx((math.exp(25) - 26, math.exp(20) - 21), rel=1e-12)


def test_difference_divergence_times_the_ratio():
    """TRL multiplies k3 by the differentiable ratio unless use_bias_correction_kl is off (DeepSeek-V3.2, arXiv 2512.02556).

    At the first update that changes no value but the gradient, to d per token: it is k2's, that of KL(π ‖ ref).
    """
    assert default("use_bias_correction_kl") is True
    given = rows(0)
    given = replace(given, old_NT=given.logprobs_NT.detach())

    def penalty(found: Tensor, without: Tensor) -> Tensor:
        return torch.autograd.grad(found - without, given.logprobs_NT, retain_graph=True)[0]

    plain, own_plain = Grpo(given, loss_type="grpo").loss(), ours(given, objective(kind="grpo"))
    theirs = Grpo(given, loss_type="grpo", beta=0.1).loss()
    k2, k3 = (ours(given, objective(kind="grpo", kl={"coef": 0.1, "estimator": name}), 0.1) for name in ("k2", "k3"))
    assert_same(theirs - plain, k3 - own_plain)
    slopes = penalty(theirs, plain), penalty(k2, own_plain), penalty(k3, own_plain)
    assert_same(slopes[0], slopes[1])
    assert float((slopes[0] - slopes[2]).norm() / slopes[2].norm()) > 0.1


def test_difference_delta_within_the_clip():
    """TRL caps the ratio at delta before it takes the clipped one: below 1 + epsilon that does nothing; ours still does."""
    given = far(math.log(1.5))
    assert Grpo(given, loss_type="grpo", delta=1.1).loss().item() == pytest.approx(1.2)
    own = objective(kind="grpo", loss={"kind": "clip", "dual_clip": 1.1})
    assert ours(given, own).item() == pytest.approx(1.1)


def test_difference_the_cap_of_cispo():
    """TRL's cap is epsilon_high, which falls back to epsilon = 0.2: unless it is set every token weighs 0.2. Ours is 5."""
    given = far(math.log(3))
    own = objective(kind="cispo")
    theirs = Grpo(given, loss_type="cispo").loss()
    assert ours(given, own).item() / theirs.item() == pytest.approx(3 / 0.2)


def test_difference_a_floor_under_truncated_weights():
    """TRL can also raise small weights (clip_min). Ours truncates from above only: a floor pulls weight to what π avoids."""
    given = far(math.log(0.1))
    given = replace(given, old_NT=given.logprobs_NT.detach())
    bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_mode": "token_truncate"}
    assert Grpo(given, **bounds).correction().item() == pytest.approx(0.5)
    own = objective(kind="grpo", correction={"kind": "tis", "level": "token", "cap": 3.0})
    assert ours(given, own).item() == pytest.approx(0.1)


def test_difference_entropy_bonus():
    """TRL's bonus is a mean over tokens whatever the loss's mean; ours is a term of the loss and averaged as it is."""
    given = rows(0)
    trainer = Grpo(given, loss_type="grpo", _entropy_bonus_enabled=True, entropy_coef=0.1)
    plain = Grpo(given, loss_type="grpo").loss()
    kept = given.mask_NT.bool()
    assert_same(plain - trainer.loss(), 0.1 * given.entropy_NT[kept].mean())
    own = ours(given, objective(kind="grpo")) - ours(given, objective(kind="grpo", entropy_coef=0.1))
    means = [row[mask].mean() for row, mask in zip(given.entropy_NT, kept, strict=True)]
    assert_same(own, 0.1 * torch.stack(means).mean())


def test_difference_rloo_clips_the_ratio_of_the_reply():
    """After the first update TRL's RLOO is min(ρ A, clip(ρ) A) with ρ the product over the reply; ours stays A · log π."""
    given = rows(0, holes=False)
    log_ratio = ((given.logprobs_NT - given.old_NT) * given.mask_NT).sum(-1).detach()
    theirs = torch.autograd.grad(Rloo(given).loss(), given.logprobs_NT)[0]
    own = torch.autograd.grad(ours(given, objective(kind="rloo")), given.logprobs_NT)[0]
    ratio, a = log_ratio.exp(), given.advantages_N
    alive = ~(((ratio > 1.2) & (a > 0)) | ((ratio < 0.8) & (a < 0)))
    assert 0 < int(alive.sum()) < len(LENGTHS)
    assert_same(theirs, own * (ratio * alive)[:, None])


def test_difference_rloo_takes_the_divergence_of_the_reply_from_its_reward():
    """TRL subtracts β · Σ_t k1 before the others' mean is; we refuse that, for an advantage per reply has no token rewards."""
    given, rewards = rows(0, holes=False), [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    spent = ((given.old_NT - given.ref_NT) * given.mask_NT).sum(-1).tolist()
    shaped: list[float | None] = [r - 0.1 * k for r, k in zip(rewards, spent, strict=True)]
    theirs = Rloo(given, beta=0.1).advantages(list(rewards), 3)
    assert theirs == pytest.approx(advantages(shaped, 3, kind="rloo"), abs=1e-12)
    with pytest.raises(ValueError, match=r"kl\.placement=reward"):
        recipe({"kind": "rloo", "kl": {"coef": 0.1, "placement": "reward"}})
