"""The interface through which a run calls its learner (in this process or on workers), and the records that it returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from lockstep.learner.statistics import Piece, combine
from lockstep.learner.value_head import CriticShare, critic_metrics
from lockstep.sync.fingerprint import Fingerprints
from lockstep.types import Critic, Learner, LearnerFacts, Metrics, Scored, TokenIds, TrainSequence


@dataclass(frozen=True, slots=True)
class LearnerState:
    """A learner's part of a checkpoint."""

    file: Literal["model.safetensors", "adapter_model.safetensors"]
    weights: Mapping[str, Tensor]
    """Weights in the layout of the file: Hugging Face's, or PEFT's for an adapter."""
    texts: Mapping[str, str]
    """Text files beside the weights: name → content."""
    optimizer: Mapping[str, Tensor]
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of an update."""

    pieces: tuple[Piece, ...]
    norm: float
    """Norm of the whole gradient, the same on every rank."""
    clipped: bool
    skipped: int
    """Skipped steps so far."""
    lr: float
    splits: int
    """Micro-batches that were run in halves."""
    critic: CriticShare | None = None
    """Share of the update of a critic that is trained together with the policy."""


def update_metrics(shares: Sequence[Share]) -> Metrics:
    """Return the metrics of an update from the shares of all ranks; they do not depend on the number of ranks."""
    first = shares[0]
    return combine([piece for share in shares for piece in share.pieces]) | {
        "batch/oom_splits": float(sum(share.splits for share in shares)),
        "grad/norm": first.norm,
        "grad/clipped": float(first.clipped),
        "grad/skipped": float(first.skipped),
        "lr": first.lr,
        **critic_metrics([share.critic for share in shares if share.critic is not None]),
    }


def scored_by(shares: Sequence[Share]) -> tuple[Scored, ...]:
    """Return what an update computed, micro-batch by micro-batch."""
    pieces = sorted((piece for share in shares for piece in share.pieces), key=lambda piece: piece.number)
    return tuple(piece.scored for piece in pieces)


class RunCritic(Critic, Protocol):
    """A critic with what a run asks of it besides updates; TorchCritic says what each method does."""

    @property
    def joint(self) -> object | None:
        """None if its updates are its own; else the learner's train it."""

    def counters(self) -> dict[str, int]: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def restore(self, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None: ...


class RunLearner(Learner, Protocol):
    """A learner with what a run asks of it besides updates; TorchLearner says what each method does."""

    skipped: int
    scored: tuple[Scored, ...]
    """Log-probabilities that the last update computed; empty for a supervised one."""

    def logprobs(self, sequences: Sequence[TokenIds], numeric: str = "") -> list[tuple[float, ...]]: ...

    def response_logprobs(
        self, sequences: Sequence[TrainSequence], temperature: float, *, reference: bool = False, prefix: int = 0
    ) -> list[tuple[float, ...]]: ...

    def prepare_numerics(self, numeric: str) -> tuple[int, tuple[str, ...]]: ...

    def describe(self) -> LearnerFacts: ...

    def fingerprint(self, *, frozen: bool = False, only: Collection[str] = ()) -> Fingerprints: ...

    def save(self) -> LearnerState: ...

    def restore(self, counters: Mapping[str, int], optimizer: Mapping[str, Tensor]) -> None: ...
