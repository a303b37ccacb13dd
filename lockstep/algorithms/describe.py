"""The objective of a run as text, with its numbers. It is printed at the start, and stored in manifest and report.

Written with: i replies, t trained tokens, |o_i| trained tokens of a reply, R_i its reward, sg stop-gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from lockstep.algorithms.aggregation import Mode
from lockstep.algorithms.kl import CONTROLLER_CLIP, LOG_RATIO_CLAMP
from lockstep.config.algorithm import (
    Advantage,
    GaeAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    MaxRlAdvantage,
    Parts,
    PythonAdvantage,
    RewardAdvantage,
    WhitenedAdvantage,
)
from lockstep.config.correction import Mis, Tis
from lockstep.config.schema import Recipe


@dataclass(frozen=True, slots=True)
class PolicyFormula:
    """Formula of a policy loss. Example: PolicyFormula("-A_t log π_θ", uses_ratio=False)"""

    term: str
    """Term per token, to be minimised."""
    notes: tuple[str, ...] = ()
    """Lines that define the symbols of the term."""
    uses_ratio: bool = True
    own_aggregation: Mode | None = None
    """The only aggregation for which the term is the one defined in its paper."""


def number(value: float) -> str:
    """Format a setting: 0.9997, 1e-06; ten digits, so that no bound is rounded to 1."""
    return f"{value:.10g}"


def describe(recipe: Recipe, policy: PolicyFormula, *, recomputes_old: bool) -> str:
    """Return the formula in several lines: the loss, its denominator, each symbol, then the parts that are not in force."""
    parts = recipe.algorithm
    lines = [
        f"L = {_SUMS[parts.aggregation].replace('MAX', str(recipe.rollout.max_tokens))} [ {_terms(parts, policy)} ]",
        f"divided by: {_denominator(parts.aggregation, recipe)}",
        *_aggregation_notes(parts.aggregation, policy),
        _ratio(recipe, policy, recomputes_old),
        *policy.notes,
        *_advantage(parts.advantage, recipe),
        *_divergence(recipe, recomputes_old),
        *_correction(parts, recomputes_old),
        *_critic(parts),
        *_sampling(recipe),
        *_overlong(recipe),
    ]
    absent = ", ".join(_absent(parts))
    return "\n".join([*lines, f"not in force: {absent}"] if absent else lines)


# --- the loss ---------------------------------------------------------------------------------------------------------
_SUMS: dict[Mode, str] = {
    "token-mean": "1/Σ_i|o_i| Σ_i Σ_t",
    "seq-mean-token-mean": "1/N Σ_i 1/|o_i| Σ_t",
    "seq-mean-token-sum": "1/N Σ_i Σ_t",
    "seq-mean-token-sum-norm": "1/N Σ_i 1/MAX Σ_t",
    "prompt-mean": "1/P Σ_p 1/Σ_i|o_pi| Σ_i Σ_t",
}


def _terms(parts: Parts, policy: PolicyFormula) -> str:
    terms = policy.term if parts.correction.kind == "none" else f"w_t · ({policy.term})"
    if parts.kl.coef > 0 and parts.kl.placement == "loss":
        terms += f" + β · {parts.kl.estimator}(π_θ, π_ref)"
    if parts.entropy_coef > 0:
        terms += f" - {number(parts.entropy_coef)} · H_t"
    return terms


def _denominator(mode: Mode, recipe: Recipe) -> str:
    replies = f"the N = {recipe.samples_per_update} replies of an update"
    match mode:
        case "token-mean":
            what = f"all trained tokens of the {recipe.samples_per_update} replies of an update"
        case "seq-mean-token-mean":
            what = f"each reply's own trained tokens |o_i|, then {replies}"
        case "seq-mean-token-sum":
            what = f"{replies}; long replies weigh more"
        case "seq-mean-token-sum-norm":
            what = f"the constant rollout.max_tokens = {recipe.rollout.max_tokens}, then {replies}"
        case "prompt-mean":
            what = "the trained tokens of a prompt's replies in the update, then the P prompts in it"
        case _:
            assert_never(mode)
    return f"{what}. Replies without a trained token, or unscored, count nowhere"


def _aggregation_notes(mode: Mode, policy: PolicyFormula) -> Iterator[str]:
    if policy.own_aggregation is not None and policy.own_aggregation != mode:
        yield (
            f"aggregation {mode} is not the paper's ({policy.own_aggregation}): "
            "the term of each token is the same, the weight of a reply is another"
        )


def _ratio(recipe: Recipe, policy: PolicyFormula, recomputes_old: bool) -> str:
    updates = f"{recipe.updates_per_step} update{'s' if recipe.updates_per_step > 1 else ''}"
    symbol = "r_t = " if policy.uses_ratio else "no ratio in the loss; what is logged as ratio is "
    clamp = f", log r_t in ±{number(LOG_RATIO_CLAMP)}" if policy.uses_ratio else ""
    if recipe.algorithm.old_logprobs == "rollout":
        return f"{symbol}π_θ / π_rollout{clamp}: the engine's own log-probabilities, two policies, no old-logprob pass"
    if recomputes_old:
        return f"{symbol}π_θ / π_old{clamp}: π_old computed by the learner before the {updates} of a rollout"
    return f"{symbol}π_θ / sg(π_θ): one update per rollout, ratio 1 by construction, old-logprob pass skipped"


# --- advantages -------------------------------------------------------------------------------------------------------
def _advantage(settings: Advantage, recipe: Recipe) -> list[str]:
    size = recipe.samples_per_prompt
    group = f"over the {size} replies of a prompt"
    match settings:
        case GroupAdvantage():
            spread = (
                f" / (std(R, ddof={settings.std_ddof}) + {number(settings.std_eps)})" if settings.divide_by_std else ""
            )
            centred = f"(R_i - mean(R)){spread}" if spread else "R_i - mean(R)"
            return [f"A_t = A_i = {centred}, {group}; 0 if all are equal"]
        case LeaveOneOutAdvantage():
            return [f"A_t = A_i = R_i - mean of the other {size - 1} replies of the prompt; 0 if all are equal"]
        case MaxRlAdvantage():
            return [
                f"A_t = A_i = (R_i - mean(R)) / (mean(R) + {number(settings.mean_eps)}), {group}; 0 if all are equal"
            ]
        case RewardAdvantage():
            return [f"A_t = A_i = R_i - {number(settings.baseline)}" if settings.baseline else "A_t = A_i = R_i"]
        case WhitenedAdvantage():
            return [
                f"A_t = {_whitened('G', settings.whiten_eps)}",
                f"G_t = ρ_t + {number(settings.gamma)} · G_t', t' the reply's next trained token, past observations",
                _token_reward(recipe, f"R_i - mean(R), {group}," if settings.baseline == "group_mean" else "R_i"),
            ]
        case PythonAdvantage():
            return [f"A_t by {settings.path}"]
        case GaeAdvantage():
            own, gamma = ("Â" if settings.whiten else "A"), number(settings.gamma)
            outer = [f"A_t = {_whitened('Â', settings.whiten_eps)}"] if settings.whiten else []
            return [
                *outer,
                f"{own}_t = δ_t + {gamma} · {number(settings.lam)} · {own}_t', δ_t = ρ_t + {gamma} · V_t' - V_t, "
                "t' the reply's next trained token, past observations",
                _token_reward(recipe, "R_i"),
            ]
        case _:
            assert_never(settings)


def _whitened(symbol: str, eps: float) -> str:
    return f"({symbol}_t - mean({symbol})) / sqrt(var({symbol}, ddof=1) + {number(eps)}) over all trained tokens of the step"


def _token_reward(recipe: Recipe, reward: str) -> str:
    kl = recipe.algorithm.kl
    penalty = f" - β · {kl.estimator}(π_old, π_ref)" if kl.coef > 0 and kl.placement == "reward" else ""
    return f"ρ_t = {reward} at the last trained token of the reply, 0 before{penalty and f'; everywhere{penalty}'}"


# --- the rest ---------------------------------------------------------------------------------------------------------
def _divergence(recipe: Recipe, recomputes_old: bool) -> Iterator[str]:
    kl = recipe.algorithm.kl
    if kl.coef == 0:
        return
    estimator = {"k1": "k1 = d", "k2": "k2 = d²/2", "k3": "k3 = exp(-d) - 1 + d"}[kl.estimator]
    if kl.placement == "loss":
        policy, where = "π_θ", "in the loss"
    else:
        source = "computed by the learner" if recomputes_old else "the engine's log-probabilities stand for it"
        policy, where = "π_old", f"in the reward of each token; π_old: {source}"
    reference = (
        "the base with its adapters off" if recipe.adapter.kind != "none" else "a frozen copy of the first weights"
    )
    yield f"{estimator}, d = log {policy} - log π_ref in ±{number(LOG_RATIO_CLAMP)}, {where}; π_ref is {reference}"
    if kl.target is None:
        yield f"β = {number(kl.coef)}, fixed"
    else:
        yield (
            f"β starts at {number(kl.coef)}; after each step "
            f"β ← β · (1 + clip(mean k1 / {number(kl.target)} - 1, ±{number(CONTROLLER_CLIP)}) · samples / {kl.horizon})"
        )


def _correction(parts: Parts, recomputes_old: bool) -> Iterator[str]:
    correction = parts.correction
    if correction.kind == "none":
        return
    own = f"{'π_old' if recomputes_old else 'sg(π_θ)'} / π_rollout"
    source = {
        "token": f"{own} of the token",
        "sequence": f"Π_t {own} of the reply",
        "geometric": f"(Π_t {own})^(1/|o_i|) of the reply",
    }[correction.level]
    scope = "constant; KL and entropy terms are not multiplied"
    match correction:
        case Tis():
            yield f"w_t = min(w, {number(correction.cap)}), w = {source}, log w in ±{number(LOG_RATIO_CLAMP)}; {scope}"
        case Mis():
            kept = "w" if correction.weigh else "1"
            yield (
                f"w_t = {kept} where {number(correction.low)} <= w <= {number(correction.high)}, else 0, w = {source}, "
                f"log w in ±{number(LOG_RATIO_CLAMP)}; {scope}; tokens with w_t = 0 stay in the denominators"
            )
        case _:
            assert_never(correction)


def _critic(parts: Parts) -> Iterator[str]:
    critic = parts.critic
    if critic is None:
        return
    target = "G_t = Â_t + V_t" if parts.advantage.kind == "gae" and parts.advantage.whiten else "G_t = A_t + V_t"
    loss = "½ (V_t - G_t)²"
    if critic.value_clip is not None:
        loss = f"½ max((V_t - G_t)², (V_old + clip(V_t - V_old, ±{number(critic.value_clip)}) - G_t)²)"
    shared = f", added to L times {number(critic.coef)}" if critic.backbone == "shared" else ""
    warmup = f"; alone for the first {critic.warmup_steps} steps" if critic.warmup_steps else ""
    yield (
        f"critic ({critic.backbone} backbone, learning rate {number(critic.lr)}): {loss}, {target}, divided as L{shared}{warmup}"
    )


def _sampling(recipe: Recipe) -> Iterator[str]:
    sampling = recipe.algorithm.dynamic_sampling
    if sampling.enabled:
        yield (
            "dynamic sampling: prompts whose replies are all right or all wrong, by the unshaped accuracy, are replaced until "
            f"there are {recipe.prompts_per_step}, in at most {sampling.max_rounds} rounds"
        )


def _overlong(recipe: Recipe) -> Iterator[str]:
    overlong, longest = recipe.algorithm.overlong, recipe.rollout.max_tokens
    if overlong.buffer:
        start = longest - overlong.buffer
        yield f"overlong penalty: R_i less 0 to {number(overlong.penalty)}, linearly from {start} tokens to {longest}"
    if overlong.drop_truncated:
        yield "overlong filter: truncated replies count in their group's mean and nowhere else"


def _absent(parts: Parts) -> Iterator[str]:
    if parts.kl.coef == 0:
        yield "KL (no reference model)"
    if parts.correction.kind == "none":
        yield "rollout correction (the mismatch is logged)"
    if parts.entropy_coef == 0:
        yield "entropy bonus (entropy is logged)"
