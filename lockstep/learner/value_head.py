"""The value head of a critic, and its training. Legend: R tokens with loss of a micro-batch, H hidden size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.algorithms.losses import value_loss
from lockstep.config.algorithm import Critic
from lockstep.config.schema import Recipe
from lockstep.errors import LearnerError
from lockstep.learner.oom import memory_for_step
from lockstep.learner.packing import per_token
from lockstep.learner.ranks import Ranks
from lockstep.learner.schedule import learning_rate
from lockstep.learner.sharded import build_optimizer
from lockstep.types import Metrics, TrainSequence


class ValueHead(nn.Module):
    """A linear head on final hidden states: w·h + b, in fp32 (fp64 for a float64 model), whatever the model's precision.

    It starts at zero. Every first value is then 0, so that the first advantages are those of the rewards alone, without a
    random head's noise; and w = 0 sends no gradient below, so that an untrained head does not disturb a shared backbone. w
    itself has a gradient from the first update on: the states differ, so there is no symmetry to break.
    """

    def __init__(self, hidden: int, like: Tensor) -> None:
        """Create the head. `like` is a parameter of the model: its device, and its precision if that is more than fp32."""
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.weight = nn.Parameter(torch.zeros(hidden, dtype=dtype, device=like.device))
        self.bias = nn.Parameter(torch.zeros((), dtype=dtype, device=like.device))

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """Return values [R]."""
        return hidden_RH.to(self.weight.dtype) @ self.weight + self.bias


@dataclass(frozen=True, slots=True)
class ValuePiece:
    """Values of one micro-batch, or of half of one; plain numbers, so that another process can combine them."""

    number: int
    """Place of the micro-batch in the update."""
    columns: bytes
    """Value, return and undivided loss of each token, float64 [3, R]."""


@dataclass(frozen=True, slots=True)
class CriticShare:
    """One rank's part of an update of the critic."""

    pieces: tuple[ValuePiece, ...]
    norm: float
    """Norm of the whole gradient, the same on every rank."""
    lr: float
    skipped: int
    """Skipped steps so far."""
    splits: int = 0
    """Micro-batches that were run in halves."""


def critic_metrics(shares: Sequence[CriticShare]) -> Metrics:
    """Return the metrics of an update of the critic; they do not depend on the number of ranks."""
    if not shares:
        return {}
    pieces = sorted((piece for share in shares for piece in share.pieces), key=lambda piece: piece.number)
    columns = [torch.frombuffer(bytearray(one.columns), dtype=torch.float64).view(3, -1) for one in pieces]
    return (_report(torch.cat(columns, 1)) if columns else {}) | {
        "critic/grad_norm": shares[0].norm,
        "critic/lr": shares[0].lr,
        "critic/skipped": float(shares[0].skipped),
    }


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """A micro-batch's part of an update."""

    loss: Tensor
    """Term to add to the differentiated loss."""
    columns_3R: Tensor
    """Value, return and undivided loss of each token."""


class ValueTraining:
    """The critic's loss, optimizer and counters, for a head alone or with the backbone that it owns.

    The loss of an update is coef · Σ_i weight_i Σ_t ½·max((V-R)², (clip(V, V_old ± value_clip) - R)²) with the sequences' own
    weights: aggregated as the policy's loss is, for PPO the mean over the update's trained tokens. The weights are decided
    before any split, so the gradient does not depend on micro-batches, order or ranks; and with a shared backbone, coef is the
    ratio of both losses per token under every aggregation.
    """

    def __init__(
        self,
        head: ValueHead,
        trained: Mapping[str, nn.Parameter],
        settings: Critic,
        recipe: Recipe,
        *,
        coef: float,
        ranks: Ranks | None = None,
    ) -> None:
        """Set up training. `trained` are all parameters that `step` changes, including the head's; `ranks` as TorchLearner's."""
        self.head, self.trained = head, dict(trained)
        self.optimizer = build_optimizer(self.trained, recipe.optimizer, ranks)
        self.optimizer_step, self.skipped, self._skipped_in_a_row = 0, 0, 0
        self._settings, self._schedule, self._coef = settings, recipe.optimizer, coef
        self._optimizer_steps = recipe.steps * recipe.updates_per_step
        self._max_skipped = recipe.update.max_skipped
        self._recorded: list[tuple[int, Tensor]] = []
        self._number = 0

    def loss(self, hidden_RH: Tensor, sequences: Sequence[TrainSequence]) -> ValueLoss:
        """Return a micro-batch's part of the update's loss. `sequences` in the order in which they were packed.

        Give it to `record` when its backward pass is done. Raises LearnerError if the sequences carry no values or returns.
        """
        values_R: Tensor = self.head(hidden_RH)
        old_R = per_token(sequences, [_attached(s.values) for s in sequences], values_R)
        returns_R = per_token(sequences, [_attached(s.returns) for s in sequences], values_R)
        weight_R = per_token(sequences, [[s.weight] * len(s.ids) for s in sequences], values_R)
        loss_R = value_loss(values_R, old_R, returns_R, self._settings.value_clip)
        return ValueLoss(self._coef * (weight_R * loss_R).sum(), torch.stack([values_R, returns_R, loss_R]).detach())

    def forget(self) -> None:
        """Drop the remains of a failed update."""
        self.optimizer.forget()
        self._recorded = []

    def begin(self, number: int) -> None:
        """Set the place in the update of the micro-batch that is recorded next."""
        self._number = number

    def record(self, part: ValueLoss) -> None:
        """Count a micro-batch in the metrics of `step`."""
        self._recorded.append((self._number, part.columns_3R))

    def step(self) -> CriticShare:
        """Make one optimizer step on the gradients since the last; a non-finite gradient changes nothing and is counted.

        Raises LearnerError after too many of those in a row.
        """
        lr = learning_rate(self._schedule, self._settings.lr, self.optimizer_step, self._optimizer_steps)
        with memory_for_step(f"optimizer step {self.optimizer_step} of the critic"):
            outcome = self.optimizer.step(lr)
        self.optimizer_step += 1
        self.skipped += outcome.skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if outcome.skipped else 0
        recorded, self._recorded = self._recorded, []
        if self._skipped_in_a_row >= self._max_skipped:
            raise LearnerError(
                f"{self._skipped_in_a_row} critic steps in a row were skipped: the gradient norm is {outcome.norm}",
                where=f"optimizer step {self.optimizer_step} of the critic",
                fix="check that no reward is extremely large, or lower algorithm.critic.lr",
            )
        pieces = tuple(ValuePiece(number, columns.double().cpu().numpy().tobytes()) for number, columns in recorded)
        return CriticShare(pieces, outcome.norm, lr, self.skipped)

    def counters(self) -> dict[str, int]:
        return {
            "optimizer_step": self.optimizer_step,
            "skipped": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def restore(self, counters: Mapping[str, int], optimizer: Mapping[str, Tensor]) -> None:
        """Continue where `counters` and the optimizer's tensors were saved. Raises CheckpointError for other parameters."""
        self.optimizer.restore(optimizer)
        self.optimizer_step, self.skipped = counters["optimizer_step"], counters["skipped"]
        self._skipped_in_a_row = counters["skipped_in_a_row"]


def _report(columns_3T: Tensor) -> Metrics:
    """Return means over the trained tokens of an update, of the values before its step."""
    values_T, returns_T, loss_T = columns_3T.double()
    error_T = returns_T - values_T
    # The larger of the two squares is the clipped one: the value has left its band on the far side of the return.
    stopped_T = loss_T > error_T**2 / 2 * (1 + 1e-6)
    metrics = {
        "critic/loss": float(loss_T.mean()),
        "critic/value_mean": float(values_T.mean()),
        "critic/clip_share": float(stopped_T.double().mean()),
    }
    spread = float(returns_T.var(correction=0))
    if spread > 0:  # if all returns are equal, there is nothing to explain
        metrics["critic/explained_variance"] = 1 - float(error_T.var(correction=0)) / spread
    return metrics


def _attached(values: tuple[float, ...] | None) -> tuple[float, ...]:
    if values is None:
        raise LearnerError(
            "the batch has no values or returns for the critic",
            where="algorithm.critic",
            fix="attach the critic's values, and the returns from credit assignment, to each TrainSequence",
        )
    return values
