"""Sequences with their advantages, and what losses and the learner pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lockstep.types.basic import TokenIds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence as the learner sees it: a prompt, then a response whose `trained` tokens carry loss. Lists are per response
    token."""

    prompt_ids: TokenIds
    ids: TokenIds
    trained: tuple[bool, ...]
    rollout_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    weight: float
    """The share of this sequence's summed token losses in the batch loss: aggregation is decided before any split."""
    group: int
    """Sequences of one group have the same prompt_ids."""
    old_logprobs: tuple[float, ...] | None = None
    """Log-probabilities before the first update of this rollout; None when the update is the only one (ratio is 1)."""
    ref_logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    """What the critic expected before each token, before any update of the step."""
    returns: tuple[float, ...] | None = None
    """What the critic is trained towards."""
    reward: float | None = 0.0
    """Reward of the whole response, overlong penalty included; None is unscored."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Parts of `reward` that an earlier token earned: its index, and the part. The last trained token earned the rest."""
    penalties: tuple[float, ...] = ()
    """Subtracted from each token's reward (KL in the reward); empty is none."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one optimizer update."""

    sequences: tuple[TrainSequence, ...]
    temperature: float = 1.0
    """Log-probabilities are of softmax(logits / temperature), as they were sampled."""
    prefix: int = 0
    """Leading prompt tokens that all sequences have: processed once per micro-batch."""
    kl_coef: float = 0.0
    """Weight of the KL penalty, as the controller has it now."""
    supervised: bool = False
    """The replies were given, not sampled: no rollout to compare with, no advantages, and nobody asks for entropies."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """What a loss sees: the trained tokens of one micro-batch, packed end to end; whole sequences only.

    Of a supervised batch rollout_logprobs_T, advantages_T and entropy_T have no element.
    """

    logprobs_T: Tensor
    """log π_θ, with gradient."""
    old_logprobs_T: Tensor
    """log π_old, constant; equal to logprobs_T.detach() when the update is the only one of its rollout."""
    rollout_logprobs_T: Tensor
    """log π_rollout, as the engine sampled."""
    advantages_T: Tensor
    entropy_T: Tensor
    """Entropy of the token distribution, nats; carries gradient only when the loss says that it needs it."""
    sequence_T: Tensor
    """Index of the sequence of each token, 0 … N-1."""
    sequences: int
    """N."""
    ref_logprobs_T: Tensor | None = None
    kl_coef: float = 0.0
    """Weight of the KL penalty, as the controller has it now."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Per-token losses, undivided, and what to log. Only the learner multiplies by the weights and sums."""

    loss_T: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values, averaged over all trained tokens of the update."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values, of which the largest of the update is logged."""


Loss: TypeAlias = Callable[[LossInput], LossOutput]
