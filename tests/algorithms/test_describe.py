"""The formula says what is in force: every setting stands in it, with its number."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Recipe


def formula(algorithm: dict[str, Any] | None = None, **more: Any) -> str:
    return build_objective(Recipe.model_validate({"algorithm": {"kind": "grpo"} | (algorithm or {})} | more)).formula


def test_the_default_formula():
    assert build_objective(Recipe()).formula.splitlines() == [
        "L = 1/N Σ_i 1/|o_i| Σ_t [ -min(r_t A_t, clip(r_t, 0.8, 1.2) A_t) ]",
        "divided by: each reply's own trained tokens |o_i|, then the N = 64 replies of an update. "
        "Replies without a trained token, or unscored, count nowhere",
        "r_t = π_θ / sg(π_θ): one update per rollout, ratio 1 by construction, old-logprob pass skipped",
        "A_t = A_i = (R_i - mean(R)) / (std(R, ddof=1) + 1e-06), over the 8 replies of a prompt; 0 if all are equal",
        "not in force: KL (no reference model), rollout correction (the mismatch is logged), entropy bonus (entropy is logged)",
    ]


def test_everything_at_once():
    algorithm = {
        "kind": "ppo",
        "loss": {"kind": "clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3},
        "advantage": {"kind": "gae", "gamma": 0.99, "lam": 0.95},
        "kl": {"coef": 0.05, "estimator": "k1", "placement": "reward", "target": 0.1, "horizon": 5000},
        "correction": {"kind": "mis", "level": "sequence", "low": 0.25, "high": 4},
        "entropy_coef": 0.01,
        "critic": {"backbone": "shared", "lr": 2e-5, "value_clip": None, "coef": 0.75, "warmup_steps": 5},
        "dynamic_sampling": {"enabled": True, "max_rounds": 3},
        "overlong": {"buffer": 16, "penalty": 0.5, "drop_truncated": True},
    }
    assert formula(algorithm, update={"epochs": 2}).splitlines() == [
        "L = 1/Σ_i|o_i| Σ_i Σ_t [ w_t · (-max(min(r_t A_t, clip(r_t, 0.9, 1.3) A_t), 3 A_t)) - 0.01 · H_t ]",
        "divided by: all trained tokens of the 64 replies of an update. "
        "Replies without a trained token, or unscored, count nowhere",
        "r_t = π_θ / π_old, log r_t in ±20: π_old computed by the learner before the 2 updates of a rollout",
        "dual clip: the outer max acts where A_t < 0",
        "A_t = (Â_t - mean(Â)) / sqrt(var(Â, ddof=1) + 1e-08) over all trained tokens of the step",
        "Â_t = δ_t + 0.99 · 0.95 · Â_t', δ_t = ρ_t + 0.99 · V_t' - V_t, t' the reply's next trained token, past observations",
        "ρ_t = R_i at the last trained token of the reply, 0 before; everywhere - β · k1(π_old, π_ref)",
        "k1 = d, d = log π_old - log π_ref in ±20, in the reward of each token; π_old: computed by the learner; "
        "π_ref is a frozen copy of the first weights",
        "β starts at 0.05; after each step β ← β · (1 + clip(mean k1 / 0.1 - 1, ±0.2) · samples / 5000)",
        "w_t = w where 0.25 <= w <= 4, else 0, w = Π_t π_old / π_rollout of the reply, log w in ±20; constant; "
        "KL and entropy terms are not multiplied; tokens with w_t = 0 stay in the denominators",
        "critic (shared backbone, learning rate 2e-05): ½ (V_t - G_t)², G_t = Â_t + V_t, divided as L, added to L times 0.75; "
        "alone for the first 5 steps",
        "dynamic sampling: prompts whose replies are all right or all wrong, by the unshaped accuracy, are replaced until "
        "there are 8, in at most 3 rounds",
        "overlong penalty: R_i less 0 to 0.5, linearly from 48 tokens to 64",
        "overlong filter: truncated replies count in their group's mean and nowhere else",
    ]


CHANGES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no std": ({"advantage": {"kind": "group", "divide_by_std": False}}, ("A_t = A_i = R_i - mean(R), over",)),
    "std_eps": ({"advantage": {"kind": "group", "std_eps": 0.003}}, ("0.003",)),
    "std_ddof": ({"advantage": {"kind": "group", "std_ddof": 0}}, ("ddof=0",)),
    "leave one out": ({"advantage": {"kind": "leave_one_out"}}, ("mean of the other 7 replies",)),
    "max_rl": ({"advantage": {"kind": "max_rl", "mean_eps": 0.02}}, ("/ (mean(R) + 0.02)",)),
    "reward": ({"advantage": {"kind": "reward"}}, ("A_t = A_i = R_i\n",)),
    "reward baseline": ({"advantage": {"kind": "reward", "baseline": 0.3}}, ("R_i - 0.3",)),
    "whitened": ({"advantage": {"kind": "whitened"}}, ("mean(G)", "ρ_t = R_i at", "1 · G_t'")),
    "whitened γ": ({"advantage": {"kind": "whitened", "gamma": 0.9}}, ("0.9 · G_t'",)),
    "whitened ε": ({"advantage": {"kind": "whitened", "whiten_eps": 1e-5}}, ("+ 1e-05)",)),
    "whitened baseline": (
        {"advantage": {"kind": "whitened", "baseline": "group_mean"}},
        ("ρ_t = R_i - mean(R), over the 8 replies of a prompt, at the last",),
    ),
    "clip_low": ({"loss": {"kind": "clip", "clip_low": 0.17}}, ("0.83, 1.2)",)),
    "clip_high": ({"loss": {"kind": "clip", "clip_high": 0.28}}, ("0.8, 1.28)",)),
    "a bound near 1": ({"loss": {"kind": "gspo", "clip_low": 1e-8, "clip_high": 2e-8}}, ("0.99999999, 1.00000002)",)),
    "gspo": (
        {"loss": {"kind": "gspo"}},
        ("-min(s_t A_t, clip(s_t, 0.9997, 1.0004) A_t)", "s_i = exp(1/|o_i| Σ_t log r_t)"),
    ),
    "cispo": (
        {"loss": {"kind": "cispo", "weight_floor": 0.1, "weight_cap": 6}},
        ("-sg(clip(r_t, 0.1, 6)) A_t log π_θ",),
    ),
    "reinforce": ({"loss": {"kind": "reinforce"}}, ("[ -A_t log π_θ ]", "no ratio in the loss")),
    "dual clip": ({"loss": {"kind": "clip", "dual_clip": 2.5}}, ("-max(min(", "2.5 A_t)", "where A_t < 0")),
    "kl": ({"kl": {"coef": 0.04}}, ("+ β · k3(π_θ, π_ref)", "k3 = exp(-d) - 1 + d, d = log π_θ", "β = 0.04, fixed")),
    "kl estimator": ({"kl": {"coef": 0.04, "estimator": "k2"}}, ("k2(π_θ, π_ref)", "k2 = d²/2")),
    "kl target": ({"kl": {"coef": 0.04, "target": 0.2}}, ("β starts at 0.04", "mean k1 / 0.2 - 1", "/ 10000)")),
    "kl horizon": ({"kl": {"coef": 0.04, "target": 0.2, "horizon": 123}}, ("samples / 123)",)),
    "kl in the reward": (
        {"advantage": {"kind": "whitened"}, "kl": {"coef": 0.04, "placement": "reward"}},
        ("everywhere - β · k3(π_old, π_ref)", "the engine's log-probabilities stand for it"),
    ),
    "entropy": ({"entropy_coef": 0.0125}, ("- 0.0125 · H_t ]",)),
    "tis": ({"correction": {"kind": "tis"}}, ("w_t · (-min(", "min(w, 2), w = sg(π_θ) / π_rollout of the token")),
    "tis cap": ({"correction": {"kind": "tis", "cap": 3.5}}, ("min(w, 3.5)",)),
    "tis sequence": (
        {"correction": {"kind": "tis", "level": "sequence"}},
        ("w = Π_t sg(π_θ) / π_rollout of the reply",),
    ),
    "mis": ({"correction": {"kind": "mis"}}, ("w_t = w where 0.5 <= w <= 5, else 0", "stay in the denominators")),
    "mis band": ({"correction": {"kind": "mis", "low": 0.2, "high": 7}}, ("0.2 <= w <= 7",)),
    "mis unweighed": ({"correction": {"kind": "mis", "weigh": False}}, ("w_t = 1 where",)),
    "mis geometric": (
        {"correction": {"kind": "mis", "level": "geometric", "low": 0.999, "high": 1.001}},
        ("0.999 <= w <= 1.001", "(Π_t sg(π_θ) / π_rollout)^(1/|o_i|)"),
    ),
    "old recompute": ({"old_logprobs": "recompute"}, ("π_old computed by the learner before the 1 update",)),
    "old rollout": ({"old_logprobs": "rollout"}, ("π_θ / π_rollout", "two policies, no old-logprob pass")),
    "token-mean": ({"aggregation": "token-mean"}, ("1/Σ_i|o_i| Σ_i Σ_t", "all trained tokens of the 64 replies")),
    "token-sum": ({"aggregation": "seq-mean-token-sum"}, ("1/N Σ_i Σ_t", "N = 64")),
    "sum-norm": (
        {"aggregation": "seq-mean-token-sum-norm"},
        ("1/N Σ_i 1/64 Σ_t", "the constant rollout.max_tokens = 64"),
    ),
    "prompt-mean": ({"aggregation": "prompt-mean"}, ("1/P Σ_p", "the trained tokens of a prompt's replies")),
    "dynamic sampling": (
        {"dynamic_sampling": {"enabled": True, "max_rounds": 5}},
        ("until there are 8", "at most 5 rounds"),
    ),
    "overlong": ({"overlong": {"buffer": 10}}, ("R_i less 0 to 1, linearly from 54 tokens to 64",)),
    "overlong penalty": ({"overlong": {"buffer": 10, "penalty": 2}}, ("R_i less 0 to 2",)),
    "overlong filter": ({"overlong": {"drop_truncated": True}}, ("truncated replies count in their group's mean",)),
    "ppo": (
        {"kind": "ppo"},
        ("critic (own backbone, learning rate 1e-05): ½ max((V_t - G_t)²", "±0.2", "divided as L\n"),
    ),
    "ppo, not whitened": (
        {"kind": "ppo", "advantage": {"kind": "gae", "whiten": False}},
        ("\nA_t = δ_t + 1 · 1 · A_t'", "G_t = A_t + V_t"),
    ),
}
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "samples": ({"samples_per_prompt": 16}, ("the 16 replies", "N = 128")),
    "prompts": ({"prompts_per_step": 3}, ("N = 24",)),
    "updates": ({"update": {"samples_per_update": 16}}, ("N = 16", "the 4 updates", "π_old")),
    "epochs": ({"update": {"epochs": 3}}, ("the 3 updates", "π_old")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_formula_holds_the_numbers_in_force(change: str):
    settings, parts = CHANGES[change]
    for part in parts:
        assert part in formula(settings)


@pytest.mark.parametrize("change", RECIPES)
def test_the_formula_holds_the_size_of_the_batch(change: str):
    more, parts = RECIPES[change]
    for part in parts:
        assert part in formula(**more)


def test_all_settings_give_different_formulas():
    found = [formula(settings) for settings, _ in CHANGES.values()]
    found += [formula(**more) for more, _ in RECIPES.values()]
    assert len({*found, formula()}) == len(CHANGES) + len(RECIPES) + 1


def test_what_is_not_in_force_is_said_and_nothing_else():
    full = {"kl": {"coef": 0.1}, "correction": {"kind": "tis"}, "entropy_coef": 0.1}
    assert "not in force" not in formula(full)
    assert formula({"kl": {"coef": 0.1}}).splitlines()[-1] == (
        "not in force: rollout correction (the mismatch is logged), entropy bonus (entropy is logged)"
    )


def test_gspo_with_another_mean_says_that_it_is_not_the_papers():
    note = "aggregation token-mean is not the paper's (seq-mean-token-mean)"
    assert note in formula({"kind": "gspo", "aggregation": "token-mean"})
    assert "not the paper's" not in formula({"kind": "gspo"})
    assert "not the paper's" not in formula({"aggregation": "token-mean"})


def test_the_reference_is_named():
    adapter = {"adapter": {"kind": "lora"}}
    assert "π_ref is the base with its adapters off" in formula({"kl": {"coef": 0.1}}, **adapter)
    assert "π_ref is a frozen copy of the first weights" in formula({"kl": {"coef": 0.1}})
