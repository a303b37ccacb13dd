"""A learner that does not train: it gives log-probabilities and weights, for evaluations and for workers that only sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.errors import DEFECT, LearnerError
from lockstep.learner.learner import plain_logprobs
from lockstep.models.weights import named_weights
from lockstep.noise.apply import require_clean
from lockstep.types import Batch, Loss, Metrics, TokenIds, WeightStream


class FrozenLearner:
    """Weights that are read and never trained: the part of types.Learner that a proof of sync needs."""

    def __init__(self, model: nn.Module, tokens_per_microbatch: int) -> None:
        self.model = model
        self.version = 0
        self._tokens_per_microbatch = tokens_per_microbatch

    def logprobs(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Return the log-probability of each token but the first, temperature 1, by the learner's packed forward pass."""
        return plain_logprobs(self.model, sequences, self._tokens_per_microbatch)

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        raise LearnerError("an update was requested of a learner that does not train", fix=DEFECT)

    def weights(self) -> WeightStream:
        require_clean(self.model, "its weights were requested")
        return named_weights(self.model)
