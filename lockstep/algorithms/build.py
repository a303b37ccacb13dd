"""Builds the algorithm from its settings: credit assignment, weights of sequences, the loss, their inputs, and the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from torch import Tensor

from lockstep.algorithms.aggregation import Mode, sequence_weights
from lockstep.algorithms.correction import importance_weights
from lockstep.algorithms.credit import assign_credit
from lockstep.algorithms.describe import PolicyFormula, describe, number
from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.losses import bounded_weight, clipped_ratio, negative_log_likelihood, reinforce, sequence_ratio
from lockstep.algorithms.user_advantage import load_estimator
from lockstep.algorithms.user_loss import load_loss
from lockstep.config.algorithm import (
    CispoLoss,
    ClipLoss,
    GspoLoss,
    Parts,
    PolicyLoss,
    PythonAdvantage,
    PythonLoss,
    ReinforceLoss,
)
from lockstep.config.schema import Recipe, Sft
from lockstep.errors import DEFECT, LearnerError
from lockstep.types import Loss, LossInput, LossOutput, TrainSequence


@dataclass(frozen=True, slots=True)
class Objective:
    """An algorithm as the loop uses it."""

    credit: Callable[[Sequence[TrainSequence]], list[TrainSequence]]
    """Takes all graded replies of a step; returns the same with advantages (and returns), in their order."""
    weights: Callable[[Sequence[int], Sequence[int]], tuple[float, ...]]
    """Trained tokens and prompt index of each sequence → weight of each in the batch loss."""
    loss: Loss
    needs_reference: bool
    """True if log-probabilities of the reference model are read, by the loss or by the reward."""
    reference_before_credit: bool
    """True if the reward reads them: TrainSequence.penalties must hold the KL penalty of each token."""
    recomputes_old: bool
    """True if the learner must compute log π_old before the first update of a step."""
    needs_values: bool
    """True if TrainSequence.values must hold the critic's predictions."""
    zero_advantage_is_zero_gradient: bool
    """True if a sample with advantage 0 cannot move any weights, so that its forward pass can be left out."""
    formula: str
    """The objective in force, in several lines."""

    @property
    def extra_passes(self) -> bool:
        """True if log-probabilities or values are computed before the update."""
        return self.recomputes_old or self.needs_reference or self.needs_values


def build_objective(recipe: Recipe) -> Objective:
    """Return the objective of a recipe. Raises LearnerError if a loss of the user's own cannot be used.

    A new loss is a variant in config/algorithm.py, its function in losses.py, and a case in _policy below.
    """
    if recipe.sft is not None:
        return _supervised(recipe.sft)
    parts = recipe.algorithm
    penalised = parts.kl.coef > 0
    policy, formula = _policy(parts.loss, reference=penalised)
    own = load_estimator(parts.advantage) if isinstance(parts.advantage, PythonAdvantage) else None
    credit = partial(assign_credit, parts.advantage, estimator=own)
    in_loss = penalised and parts.kl.placement == "loss"
    recomputes = parts.old_logprobs == "recompute" or (parts.old_logprobs == "auto" and recipe.updates_per_step > 1)
    return Objective(
        credit=credit,
        weights=partial(sequence_weights, mode=parts.aggregation, max_tokens=recipe.rollout.max_tokens),
        loss=partial(_loss, policy, parts),
        needs_reference=penalised,
        reference_before_credit=penalised and not in_loss,
        recomputes_old=recomputes,
        needs_values=parts.advantage.kind == "gae",
        zero_advantage_is_zero_gradient=(
            not in_loss and parts.entropy_coef == 0 and parts.critic is None and parts.loss.kind != "python"
        ),
        formula=describe(recipe, formula, recomputes_old=recomputes),
    )


def _supervised(settings: Sft) -> Objective:
    """Return the objective of SFT: no credit is assigned, and nothing but the policy's own log-probabilities is read."""
    by_token = settings.aggregation == "token_mean"
    mode: Mode = "token-mean" if by_token else "seq-mean-token-mean"
    scale = "1 / Σ_i |o_i|" if by_token else "1 / (N |o_i|)"
    return Objective(
        credit=_no_credit,
        weights=partial(sequence_weights, mode=mode, max_tokens=settings.max_tokens),
        loss=negative_log_likelihood,
        needs_reference=False,
        reference_before_credit=False,
        recomputes_old=False,
        needs_values=False,
        zero_advantage_is_zero_gradient=False,
        formula=(
            f"loss = Σ_i w_i Σ_t -log π_θ(o_it | q_i, o_i<t),  w_i = {scale}  ({settings.aggregation}, N rows a step)\n"
            f"o_it: tokens of {'the last assistant turn' if settings.train_on == 'last' else 'all assistant turns'}, end token "
            "included; all other tokens are read and carry no loss"
        ),
    )


def _no_credit(replies: Sequence[TrainSequence]) -> list[TrainSequence]:
    raise LearnerError(
        "advantages were requested in supervised training, which has no rewards",
        where="loop=sft",
        fix=DEFECT,
    )


def _policy(settings: PolicyLoss, *, reference: bool) -> tuple[Loss, PolicyFormula]:
    """Return the policy term and its formula. `reference`: the loss gets log-probabilities of the reference model."""
    match settings:
        case ClipLoss():
            loss = partial(
                clipped_ratio,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                dual_clip=settings.dual_clip,
            )
            inner = f"min(r_t A_t, clip(r_t, {number(1 - settings.clip_low)}, {number(1 + settings.clip_high)}) A_t)"
            if settings.dual_clip is None:
                return loss, PolicyFormula(f"-{inner}")
            note = "dual clip: the outer max acts where A_t < 0"
            return loss, PolicyFormula(f"-max({inner}, {number(settings.dual_clip)} A_t)", (note,))
        case GspoLoss():
            loss = partial(sequence_ratio, clip_low=settings.clip_low, clip_high=settings.clip_high)
            bounds = f"{number(1 - settings.clip_low)}, {number(1 + settings.clip_high)}"
            notes = (
                "s_t = sg(s_i) π_θ / sg(π_θ), s_i = exp(1/|o_i| Σ_t log r_t): one ratio for all tokens of a reply",
            )
            return loss, PolicyFormula(
                f"-min(s_t A_t, clip(s_t, {bounds}) A_t)", notes, own_aggregation="seq-mean-token-mean"
            )
        case CispoLoss():
            loss = partial(bounded_weight, weight_floor=settings.weight_floor, weight_cap=settings.weight_cap)
            return loss, PolicyFormula(
                f"-sg(clip(r_t, {number(settings.weight_floor)}, {number(settings.weight_cap)})) A_t log π_θ"
            )
        case ReinforceLoss():
            return reinforce, PolicyFormula("-A_t log π_θ", uses_ratio=False)
        case PythonLoss():
            given = "".join(f", {name}={value!r}" for name, value in settings.settings.items())
            return load_loss(settings, reference=reference), PolicyFormula(f"{settings.path}(inputs{given})_t")
        case _:
            assert_never(settings)


def _loss(policy: Loss, parts: Parts, inputs: LossInput) -> LossOutput:
    """Return the policy term times the correction's weight, plus the KL penalty, minus the entropy bonus."""
    weighed = inputs
    if parts.old_logprobs == "rollout":  # two policies: without the ratio, the weight is the whole π_θ / π_rollout
        weighed = replace(inputs, old_logprobs_T=inputs.logprobs_T.detach())
        inputs = replace(inputs, old_logprobs_T=inputs.rollout_logprobs_T)
    output = policy(inputs)
    loss_T, means, maxima = output.loss_T, dict(output.means), dict(output.maxima)
    if parts.correction.kind != "none":
        weights = importance_weights(weighed, parts.correction)
        loss_T = weights.weight_T * loss_T
        means, maxima = {**means, **weights.means}, {**maxima, **weights.maxima}
    if parts.kl.coef > 0 and parts.kl.placement == "loss":
        kl_T = kl_penalty(inputs.logprobs_T, _reference(inputs), parts.kl.estimator)
        means |= {"kl/ref": kl_T, "loss/kl": inputs.kl_coef * kl_T}
        loss_T = loss_T + inputs.kl_coef * kl_T
    if parts.entropy_coef > 0:
        means["loss/entropy"] = -parts.entropy_coef * inputs.entropy_T
        loss_T = loss_T - parts.entropy_coef * inputs.entropy_T
    return LossOutput(loss_T, means, maxima)


def _reference(inputs: LossInput) -> Tensor:
    if inputs.ref_logprobs_T is None:
        raise LearnerError(
            "the batch has no log-probabilities of the reference model",
            where="algorithm.kl",
            fix="give each TrainSequence its ref_logprobs",
        )
    return inputs.ref_logprobs_T
