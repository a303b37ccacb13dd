"""Where the exact policy gradient can be listed: unbiased estimators have it as their mean, biased ones miss it by what is known.

"Update" is what one optimizer update on one group would add to the parameters, through the objective's own advantages, loss
and weights. Its mean is listed over every possible group, and sampled over 100,000 replies.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.algorithms.build import Objective, build_objective
from lockstep.algorithms.kl import kl_penalty
from tests.algorithms.ragged import MAX_TOKENS, recipe
from tests.algorithms.toys import MU, PI, Toy, Vector, softmax_toy, two_step_bandit, two_step_toy, updates

SAMPLES = 100_000
SEED = 1
"""Of the means of 400 seeds 0.1 % were more than 3 standard errors away; chance would have 0.3 %."""
G = 4

ONE = softmax_toy({"": {"a": 0.3, "b": -0.5, "c": 0.8}}, {"a": 1.0, "b": 0.0, "c": 0.4})
"""One step, three arms."""
STALE = softmax_toy(
    {"": {"a": 0.3, "b": -0.5, "c": 0.8}}, {"a": 1.0, "b": 0.0, "c": 0.4}, {"": {"a": -0.3, "b": 0.2, "c": 0.5}}
)
"""The same, sampled by another policy."""
RAGGED = softmax_toy({"": {"x": 0.4, "y": 0.0}, "y": {"u": -0.2, "v": 0.5}}, {"x": 0.6, "yu": 1.0, "yv": 0.1})
"""Replies of one token (x) and of two (y, then u or v)."""
TWO = two_step_toy()
MILD = two_step_toy(mu=(0.45, 0.45, 0.8))
"""The two-step bandit, and the same with a sampler that is nearly π: token weights 0.5 to 1.125."""

SUM = "seq-mean-token-sum"
PLAIN: dict[str, Any] = {"kind": "reinforce", "aggregation": SUM}


def objective(**algorithm: Any) -> Objective:
    return build_objective(recipe(algorithm))


def tis(level: str, cap: float = 1e6) -> Objective:
    return objective(**PLAIN, correction={"kind": "tis", "level": level, "cap": cap})


def expected(toy: Toy, found: Objective, size: int = G, values: dict[str, float] | None = None) -> Vector:
    """The mean update over every group of `size` replies: no sampling."""
    table, often = toy.groups(size)
    return often @ updates(toy, found, table, values)


def sampled(toy: Toy, found: Objective, size: int = G) -> tuple[Vector, Vector]:
    """Mean and standard error of the updates of SAMPLES replies in groups; equal groups give equal updates (tested below)."""
    table, often = toy.groups(size)
    drawn = np.random.default_rng(SEED).choice(len(table), SAMPLES // size, p=often / often.sum())
    each = updates(toy, found, table)[drawn]
    return each.mean(0), each.std(0, ddof=1) / math.sqrt(len(each))


def errors(toy: Toy, found: Objective, target: Vector, size: int = G) -> float:
    """How many standard errors the sampled mean is from `target`, in the parameter where it is most."""
    mean, error = sampled(toy, found, size)
    off = np.abs(mean - target)
    counts = off > 1e-12
    return float((off[counts] / np.maximum(error[counts], 1e-300)).max(initial=0.0))


def test_the_exact_gradient_is_the_slope_of_the_value():
    def value(logits: Vector) -> float:
        tree = {"": dict(zip("xy", logits[:2], strict=True)), "y": dict(zip("uv", logits[2:], strict=True))}
        return softmax_toy(tree, {"x": 0.6, "yu": 1.0, "yv": 0.1}).value

    at, step = np.array([0.4, 0.0, -0.2, 0.5]), 1e-6
    slopes = [(value(at + step * axis) - value(at - step * axis)) / (2 * step) for axis in np.eye(4)]
    np.testing.assert_allclose(RAGGED.gradient, slopes, atol=1e-9)


def test_a_long_batch_gives_what_the_table_of_groups_says():
    """All 100,000 replies through credit, loss and weights, one by one: the sums that `sampled` takes from its table."""
    drawn = np.random.default_rng(0).choice(len(RAGGED.paths), (SAMPLES // G, G), p=[path.mu for path in RAGGED.paths])
    found = objective(kind="rloo")
    table, _ = RAGGED.groups(G)
    places = drawn @ len(RAGGED.paths) ** np.arange(G)[::-1]
    np.testing.assert_array_equal(table[places], drawn)
    np.testing.assert_allclose(updates(RAGGED, found, drawn), updates(RAGGED, found, table)[places], atol=1e-13)


# --- on-policy, unbiased ----------------------------------------------------------------------------------------------
UNBIASED: dict[str, tuple[dict[str, Any], float]] = {
    "reinforce": (PLAIN, 1.0),
    "reinforce minus a constant": (PLAIN | {"advantage": {"kind": "reward", "baseline": 0.7}}, 1.0),
    "rloo": ({"kind": "rloo"}, 1.0),
    "group mean": (
        {"kind": "grpo", "advantage": {"kind": "group", "divide_by_std": False}, "aggregation": SUM},
        (G - 1) / G,
    ),
    "dr_grpo": ({"kind": "dr_grpo"}, (G - 1) / G / MAX_TOKENS),
    "cispo, group mean": (
        {"kind": "cispo", "advantage": {"kind": "group", "divide_by_std": False}, "aggregation": SUM},
        (G - 1) / G,
    ),
}
"""With the factor by which the mean update is the exact gradient: the group's own sample in its mean costs (G - 1) / G."""


@pytest.mark.parametrize("toy", [ONE, RAGGED], ids=["one step", "two steps"])
@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_on_policy(name: str, toy: Toy):
    algorithm, factor = UNBIASED[name]
    found = objective(**algorithm)
    np.testing.assert_allclose(expected(toy, found), factor * toy.gradient, atol=1e-13)
    assert errors(toy, found, factor * toy.gradient) < 3


VALUES = {"": 0.2, "y": -0.3}
"""A critic that is wrong."""


@pytest.mark.parametrize("lam", [1.0, 0.5, 0.0])
def test_gae_is_unbiased_for_any_critic_at_lambda_1_and_for_the_true_one_at_any(lam: float):
    def found(values: dict[str, float]) -> Vector:
        advantage = {"kind": "gae", "lam": lam, "whiten": False}
        return expected(RAGGED, objective(kind="ppo", advantage=advantage, aggregation=SUM), 1, values)

    true = {"": RAGGED.value, "y": _value_of_y()}
    np.testing.assert_allclose(found(true), RAGGED.gradient, atol=1e-13)
    off = np.abs(found(VALUES) - RAGGED.gradient).max()
    assert off < 1e-13 if lam == 1 else off > 0.05


def _value_of_y() -> float:
    later = [path for path in RAGGED.paths if path.states[-1] == "y"]
    return math.fsum(path.p * path.reward for path in later) / math.fsum(path.p for path in later)


# --- on-policy, biased as documented ----------------------------------------------------------------------------------
def coin(p: float) -> Toy:
    """A prompt that is solved with probability p."""
    return softmax_toy({"": {"no": 0.0, "yes": math.log(p / (1 - p))}}, {"no": 0.0, "yes": 1.0})


def stretch(p: float, size: int, **algorithm: Any) -> float:
    """The mean update over the exact gradient, of a prompt that is solved with probability p, in groups of this size."""
    toy = coin(p)
    found = expected(toy, objective(aggregation=SUM, **algorithm), size)
    np.testing.assert_allclose(found, found[1] / toy.gradient[1] * toy.gradient, atol=1e-13)
    return float(found[1] / toy.gradient[1])


def stretch_by_hand(p: float, size: int) -> float:
    """E[(r - mean) / std · ∇log π] / ∇p over K solved of G, std with ddof 1: Σ_K P(K) K (G - K) / G² / std / (p (1 - p))."""
    total = 0.0
    for k in range(1, size):
        often = math.comb(size, k) * p**k * (1 - p) ** (size - k)
        deviation = math.sqrt(k * (size - k) / (size * (size - 1))) + 1e-6
        total += often * k * (size - k) / size**2 / deviation / (p * (1 - p))
    return total


@pytest.mark.parametrize("size", [4, 8])
def test_dividing_by_the_deviation_favours_hard_and_easy_prompts(size: int):
    """Dr.GRPO (arXiv 2503.20783, §3.1): the factor depends on the prompt with the division, and not without."""
    for p in (0.02, 0.1, 0.5, 0.98):
        assert stretch(p, size, kind="grpo") == pytest.approx(stretch_by_hand(p, size), rel=1e-9)
        assert stretch(p, size, kind="dr_grpo") == pytest.approx((size - 1) / size, rel=1e-9)
    assert stretch(0.02, size, kind="grpo") == pytest.approx(stretch(0.98, size, kind="grpo"))


def test_how_much_more_a_hard_prompt_counts():
    """Solved 2 % of the time against 50 %. Groups without both outcomes teach nothing, which hides the effect in small groups."""
    found = [stretch_by_hand(0.02, size) / stretch_by_hand(0.5, size) for size in (4, 8, 16, 64)]
    assert found == pytest.approx([1.066, 1.387, 1.863, 2.955], abs=1e-3)
    assert max(found) < math.sqrt(0.5 * 0.5 / (0.02 * 0.98)), "the limit of large groups, 3.57"


def test_dividing_by_the_deviation_is_biased_in_the_samples_too():
    found = objective(kind="grpo", aggregation=SUM)
    assert errors(ONE, found, expected(ONE, found)) < 3
    assert errors(ONE, found, (G - 1) / G * ONE.gradient) > 20


def test_max_rl_climbs_the_truncated_likelihood():
    """Σ_{k < G} (1 - p)^(k - 1) times ∇p, with many samples ∇log p: G - 1 terms, for the mean has a sample's own reward in it."""
    for p in (0.02, 0.1, 0.5, 0.9):
        expansion = math.fsum((1 - p) ** (k - 1) for k in range(1, G))
        assert stretch(p, G, kind="max_rl", advantage={"kind": "max_rl", "mean_eps": 1e-12}) == pytest.approx(expansion)


@cache
def length_bias() -> tuple[Vector, Vector]:
    algorithm = {"advantage": {"kind": "reward"}, "loss": {"kind": "reinforce"}, "aggregation": "seq-mean-token-mean"}
    found = objective(**algorithm)
    by_hand = sum((path.p * path.reward * path.scores.mean(0) for path in RAGGED.paths), np.zeros(4))
    np.testing.assert_allclose(expected(RAGGED, found), by_hand, atol=1e-13)
    assert errors(RAGGED, found, by_hand) < 3
    assert errors(RAGGED, found, RAGGED.gradient) > 20
    return by_hand, RAGGED.gradient


def test_a_mean_over_the_tokens_of_each_reply_underrates_long_ones():
    """The second step's part is halved, for it is in replies of two tokens alone; the first step is pulled to the short reply."""
    by_hand, exact = length_bias()
    np.testing.assert_allclose(by_hand[2:], exact[2:] / 2, atol=1e-13)
    assert by_hand[0] > 1.9 * exact[0] > 0, "x, which ends the reply, gets more than its due"


def test_whitening_divides_by_the_deviation_of_the_step():
    """REINFORCE++ over one step of all replies: the exact gradient, over the deviation of all rewards."""
    drawn = np.random.default_rng(SEED).choice(len(ONE.paths), SAMPLES, p=[path.p for path in ONE.paths])
    rewards = np.array([path.reward for path in ONE.paths])
    found = updates(ONE, objective(kind="reinforce_pp", aggregation=SUM), drawn[None])[0]
    deviation = math.sqrt(sum(path.p * (path.reward - ONE.value) ** 2 for path in ONE.paths))
    each = ((rewards - ONE.value) / deviation)[drawn, None] * np.concatenate([path.scores for path in ONE.paths])[drawn]
    error = each.std(0, ddof=1) / math.sqrt(SAMPLES)
    assert (np.abs(found - ONE.gradient / deviation) < 3 * error).all()


# --- divergence -------------------------------------------------------------------------------------------------------
def kl_gradients(own: Tensor, ref: Tensor, estimator: Any) -> tuple[Vector, Vector]:
    """Mean slope of the estimate as a term of the loss, and as a penalty in the reward, by the logits of a softmax."""
    logp = own.log_softmax(0).requires_grad_()
    estimate = kl_penalty(logp, ref.log_softmax(0), estimator)
    (slope,) = torch.autograd.grad(estimate.sum(), logp)
    p = own.softmax(0)
    scores = torch.eye(len(own), dtype=torch.float64) - p
    return ((p * slope) @ scores).numpy(), ((p * estimate.detach()) @ scores).numpy()


def kl_gradient(own: Tensor, ref: Tensor, *, from_ref: bool = False) -> Vector:
    """By autograd: of KL(π ‖ ref), or of KL(ref ‖ π)."""
    logits = own.clone().requires_grad_()
    one, two = logits.log_softmax(0), ref.log_softmax(0)
    divergence = (two.exp() * (two - one)).sum() if from_ref else (one.exp() * (one - two)).sum()
    return torch.autograd.grad(divergence, logits)[0].numpy()


OWN, REF = (torch.tensor(np.random.default_rng(seed).normal(size=5)) for seed in (0, 1))


def test_which_divergence_each_estimate_in_the_loss_descends():
    """k1 has no mean gradient, k2 that of KL(π ‖ ref), k3 that of KL(ref ‖ π)."""
    k1, k2, k3 = (kl_gradients(OWN, REF, estimator)[0] for estimator in ("k1", "k2", "k3"))
    np.testing.assert_allclose(k1, 0, atol=1e-14)
    np.testing.assert_allclose(k2, kl_gradient(OWN, REF), atol=1e-14)
    np.testing.assert_allclose(k3, kl_gradient(OWN, REF, from_ref=True), atol=1e-14)


def test_in_the_reward_k1_alone_is_exact():
    """There the estimates' own slopes are missing. k3 leaves the difference of two gradients that agree near the reference:

    6 % of the force at logits 0.1 apart, 0.6 % at 0.01. So it is with k2.
    """
    k1, _, k3 = (kl_gradients(OWN, REF, estimator)[1] for estimator in ("k1", "k2", "k3"))
    np.testing.assert_allclose(k1, kl_gradient(OWN, REF), atol=1e-14)
    np.testing.assert_allclose(k3, kl_gradient(OWN, REF) - kl_gradient(OWN, REF, from_ref=True), atol=1e-14)
    for apart, share in ((0.1, 0.058), (0.01, 0.0058)):
        near = OWN + apart * REF
        force = np.linalg.norm(kl_gradient(OWN, near))
        left = [np.linalg.norm(kl_gradients(OWN, near, estimator)[1]) / force for estimator in ("k1", "k2", "k3")]
        assert left == pytest.approx([1.0, share, share], rel=0.03)


# --- off-policy -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("toy", [STALE, TWO], ids=["one step", "two steps"])
def test_weights_of_whole_replies_are_unbiased(toy: Toy):
    found = tis("sequence")
    np.testing.assert_allclose(expected(toy, found, 1), toy.gradient, atol=1e-13)
    assert errors(toy, found, toy.gradient, 1) < 3


def test_token_weights_are_unbiased_over_one_step_only():
    np.testing.assert_allclose(expected(STALE, tis("token"), 1), STALE.gradient, atol=1e-13)
    assert np.abs(expected(TWO, tis("token"), 1) - TWO.gradient).max() > 0.1


def test_without_weights_the_other_policy_is_climbed():
    plain = objective(**PLAIN)
    assert errors(STALE, plain, expected(STALE, plain, 1), 1) < 3
    assert errors(STALE, plain, STALE.gradient, 1) > 20


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["tis", "mis"])
def test_bounded_weights_are_biased_by_what_they_cut(kind: str, level: str):
    """Listed from the definition: every reply with its truncated or masked weight, against ours listed and sampled."""
    low, high = 0.85, 1.115
    given = {"kind": "tis", "cap": high} if kind == "tis" else {"kind": "mis", "low": low, "high": high}
    found = objective(**PLAIN, correction=given | {"level": level})
    target = np.zeros(6)
    for path in MILD.paths:
        logs = np.subtract(path.logp, path.logmu)
        raw = {"token": np.exp(logs), "sequence": np.exp(logs.sum()), "geometric": np.exp(logs.mean())}[level]
        kept = np.minimum(raw, high) if kind == "tis" else np.where((raw >= low) & (raw <= high), raw, 0.0)
        target += path.mu * path.reward * (np.broadcast_to(kept, 2)[:, None] * path.scores).sum(0)
    np.testing.assert_allclose(expected(MILD, found, 1), target, atol=1e-13)
    assert errors(MILD, found, target, 1) < 3
    assert errors(MILD, found, MILD.gradient, 1) > 5


# --- sequence against token weights, enumerated (docs/algorithms) --------------------------------------------------------
def test_the_two_step_bandit():
    """The sampler's future (0.2 after right, where π gets 0.9) turns the first step's sign; its states shrink the second's."""
    found = two_step_bandit()
    assert found.g_true == pytest.approx((0.1, 0.0, 0.045), abs=1e-15)
    assert found.g_seq == pytest.approx((0.1, 0.0, 0.045), abs=1e-15)
    assert found.g_tok == pytest.approx((-0.075, 0.0, 0.036), abs=1e-15)


@pytest.mark.parametrize(("level", "name"), [("sequence", "g_seq"), ("token", "g_tok")])
def test_our_weights_give_the_two_step_gradients(level: str, name: str):
    """The toy's parameters are both logits of a choice; the bandit's are their differences."""
    enumerated = np.array(getattr(two_step_bandit(), name))
    both = np.stack([-enumerated, enumerated], 1).ravel()
    np.testing.assert_allclose(expected(TWO, tis(level), 1), both, atol=1e-13)
    assert errors(TWO, tis(level), both, 1) < 3


def test_what_token_weights_put_in_the_place_of_what():
    """First step: Q of the sampler's future for π's. Second step: how often the sampler comes there for how often π does."""
    g_true, _, g_tok = two_step_bandit()
    right, spread = PI[0], PI[0] * (1 - PI[0])
    assert g_true[0] == pytest.approx(spread * (PI[2] - 0.5))
    assert g_tok[0] == pytest.approx(spread * (MU[2] - 0.5))
    assert g_tok[2] / g_true[2] == pytest.approx(MU[0] / right)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.125])
def test_the_bias_falls_with_the_distance_of_the_policies(share: float):
    mu = [p + share * (m - p) for p, m in zip(PI, MU, strict=True)]
    far, near = two_step_bandit(), two_step_bandit(PI, mu)
    np.testing.assert_allclose(near.g_seq, near.g_true, atol=1e-15)
    bias = np.subtract(near.g_tok, near.g_true)
    np.testing.assert_allclose(bias, share * np.subtract(far.g_tok, far.g_true), atol=1e-15)


def test_the_price_of_weights_of_whole_replies():
    """Over T equal steps the effective share of the replies, 1 / E_μ[w²], falls as a power of T; a token's weight does not."""
    once = math.fsum(p * p / m for p, m in ((0.5, 0.4), (0.5, 0.6)))
    shares = {steps: 1 / once**steps for steps in (1, 10, 100)}
    assert shares == pytest.approx({1: 0.96, 10: 0.665, 100: 0.01687}, rel=1e-3)
