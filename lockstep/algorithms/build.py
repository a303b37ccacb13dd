"""From the algorithm's settings to its pure parts: advantages of a group, weights of sequences, the loss, and the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from lockstep.algorithms.advantages import group_relative
from lockstep.algorithms.aggregation import sequence_weights
from lockstep.algorithms.losses import clipped_ratio, kl_penalty
from lockstep.config.schema import Algorithm, Grpo, Recipe
from lockstep.errors import LearnerError
from lockstep.types import Loss, LossInput, LossOutput


@dataclass(frozen=True, slots=True)
class Objective:
    """An algorithm as the loop uses it."""

    advantages: Callable[[Sequence[float | None]], tuple[float, ...]]
    """Rewards of one group → one advantage per sample."""
    weights: Callable[[Sequence[int], Sequence[int]], tuple[float, ...]]
    """Trained tokens and prompt index of each sequence → weight of each in the batch loss."""
    loss: Loss
    needs_reference: bool
    zero_advantage_is_zero_gradient: bool
    """True if a sample with advantage 0 cannot move the weights, so that its forward pass can be left out."""
    formula: str


def build_objective(recipe: Recipe) -> Objective:
    """The objective of a recipe. A new algorithm is a variant in config/schema.py, its functions, and a case here."""
    algorithm: Algorithm = recipe.algorithm
    match algorithm:
        case Grpo():
            return _grpo(algorithm, recipe)
        case _:
            assert_never(algorithm)


def _grpo(settings: Grpo, recipe: Recipe) -> Objective:
    return Objective(
        advantages=partial(
            group_relative,
            divide_by_std=settings.divide_by_std,
            std_eps=settings.std_eps,
            std_ddof=settings.std_ddof,
        ),
        weights=partial(sequence_weights, mode=settings.aggregation, max_tokens=recipe.rollout.max_tokens),
        loss=partial(_grpo_loss, settings),
        needs_reference=settings.kl.coef > 0,
        zero_advantage_is_zero_gradient=settings.kl.coef == 0 and settings.entropy_coef == 0,
        formula=_grpo_formula(settings, recipe),
    )


def _grpo_loss(settings: Grpo, inputs: LossInput) -> LossOutput:
    policy = clipped_ratio(inputs, clip_low=settings.clip_low, clip_high=settings.clip_high)
    loss_T, means = policy.loss_T, dict(policy.means)
    if settings.kl.coef > 0:
        if inputs.ref_logprobs_T is None:
            raise LearnerError(
                "the batch has no log-probabilities of the reference model",
                where="algorithm.kl",
                fix="attach them with learner.with_ref_logprobs",
            )
        kl_T = kl_penalty(inputs.logprobs_T, inputs.ref_logprobs_T, settings.kl.estimator)
        means["kl/ref"] = kl_T
        means["loss/kl"] = settings.kl.coef * kl_T
        loss_T = loss_T + settings.kl.coef * kl_T
    if settings.entropy_coef > 0:
        means["loss/entropy"] = -settings.entropy_coef * inputs.entropy_T
        loss_T = loss_T - settings.entropy_coef * inputs.entropy_T
    return LossOutput(loss_T, means, policy.maxima)


def _grpo_formula(settings: Grpo, recipe: Recipe) -> str:
    spread = f" / (std(r, ddof={settings.std_ddof}) + {settings.std_eps:g})" if settings.divide_by_std else ""
    if recipe.updates_per_step == 1:
        ratio = "r_t = π_θ / sg(π_θ): one update per rollout, the ratio is 1 by construction and its old-logprob pass is skipped"
    else:
        ratio = f"r_t = π_θ / π_old, π_old recomputed by the learner before the {recipe.updates_per_step} updates of a rollout"
    inner = f"-min(r_t A_i, clip(r_t, {1 - settings.clip_low:g}, {1 + settings.clip_high:g}) A_i)"
    if settings.kl.coef > 0:
        inner += f" + {settings.kl.coef:g} · {settings.kl.estimator}(π_θ, π_ref)"
    if settings.entropy_coef > 0:
        inner += f" - {settings.entropy_coef:g} · H_t"
    lines = [
        f"L = {_AGGREGATION[settings.aggregation].replace('MAX', str(recipe.rollout.max_tokens))} [ {inner} ]",
        f"A_i = (r_i - mean(r)){spread}, over the {recipe.samples_per_prompt} samples of a prompt",
        ratio,
        f"N = {recipe.samples_per_update} samples per update"
        + ("" if settings.kl.coef > 0 else "; no KL term and no reference model"),
    ]
    return "\n".join(lines)


_AGGREGATION = {
    "token-mean": "1/Σ_i|o_i| Σ_i Σ_t",
    "seq-mean-token-mean": "1/N Σ_i 1/|o_i| Σ_t",
    "seq-mean-token-sum": "1/N Σ_i Σ_t",
    "seq-mean-token-sum-norm": "1/N Σ_i 1/MAX Σ_t",
    "prompt-mean": "1/P Σ_p 1/Σ_i|o_pi| Σ_i Σ_t",
}
