"""Records of training: sequences with advantages, and the inputs and outputs of losses and the learner."""

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
    """Index of the group, within which rewards are compared; those of its sequences with equal prompt_ids share their work."""
    old_logprobs: tuple[float, ...] | None = None
    """Log-probabilities before the first update of this rollout; None if there is only one update (the ratio is 1)."""
    ref_logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    """The critic's prediction before each token, before any update of the step."""
    returns: tuple[float, ...] | None = None
    """Targets of the critic."""
    reward: float | None = 0.0
    """Reward of the whole response, overlong penalty included; None is unscored."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Parts of `reward` that belong to an earlier token: its index, and the part. The rest belongs to the last trained token.
    """
    penalties: tuple[float, ...] = ()
    """Amounts subtracted from each token's reward (KL in the reward); empty is none."""
    sample: int | None = None
    """Index in the step of the graded sample whose row it is; rows of one sample share its reward. None: the sequence is a sample
    of its own."""
    routes: bytes = b""
    """Experts that sampling chose for each token (Rollout.routes); empty: routers choose by themselves."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one optimizer update."""

    sequences: tuple[TrainSequence, ...]
    temperature: float = 1.0
    """Sampling temperature: log-probabilities are those of softmax(logits / temperature)."""
    prefix: int = 0
    """Number of leading prompt tokens that all sequences share: processed once per micro-batch."""
    kl_coef: float = 0.0
    """Current weight of the KL penalty, as set by the controller."""
    supervised: bool = False
    """True if the replies were given, not sampled: no rollout log-probabilities, no advantages, no entropies needed."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """Input of a loss: the trained tokens of one micro-batch, packed end to end; whole sequences only.

    In a supervised batch rollout_logprobs_T, advantages_T and entropy_T are empty.
    """

    logprobs_T: Tensor
    """log π_θ, with gradient."""
    old_logprobs_T: Tensor
    """log π_old, constant; equal to logprobs_T.detach() when the update is the only one of its rollout."""
    rollout_logprobs_T: Tensor
    """log π_rollout, as the engine sampled."""
    advantages_T: Tensor
    entropy_T: Tensor
    """Entropy of the token distribution, nats; carries gradient only if the loss says that it needs it."""
    sequence_T: Tensor
    """Index of each token's sequence, 0 … N-1."""
    sequences: int
    """Number of sequences, N."""
    ref_logprobs_T: Tensor | None = None
    kl_coef: float = 0.0
    """Current weight of the KL penalty, as set by the controller."""
    order: TokenIds = ()
    """Index in the batch of each of the sequences."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Numbers of the trained tokens that an update computed for one micro-batch, sequence by sequence, float32."""

    order: TokenIds
    """Index in the batch of each of its sequences."""
    logprobs: bytes
    """log π_θ."""
    entropies: bytes
    """In nats, at the sampling temperature."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Per-token losses, undivided, and values to log. Only the learner multiplies by the weights and sums."""

    loss_T: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values, averaged over all trained tokens of the update."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values whose maximum over the update is logged."""


Loss: TypeAlias = Callable[[LossInput], LossOutput]
