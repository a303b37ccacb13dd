"""Records that the driver and its workers send to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from lockstep.errors import LockstepError
from lockstep.noise.targets import Targets
from lockstep.sync.fingerprint import TensorPrint
from lockstep.types import FinishReason, LearnerFacts

Plain: TypeAlias = Any
"""Lists, dicts, texts, numbers and bytes."""
START, WEIGHTS, OPTIMIZER = "start.safetensors", "weights.safetensors", "optimizer.safetensors"
"""Files by which tensors travel, in the folder of the workers."""
PART = "optimizer_{rank}.safetensors"
CRITIC = "critic_{rank}.safetensors"
Prints: TypeAlias = dict[str, TensorPrint]
"""Fingerprints of some tensors by name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a worker."""

    rank: int
    size: int
    folder: str
    """Folder of the run for logs, stacks and tensors under way."""
    rendezvous: str
    """File, new for each start, through which the ranks find each other."""
    threads: int | None
    """CPU threads; None leaves torch's choice."""
    samplers: int = 0
    """Workers that only sample; their ranks come after the `size` that train."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model, for a driver that has none."""

    learner: LearnerFacts
    numerics: Literal["fp32", "bf16"]
    context: int | None
    stop_ids: tuple[int, ...]
    """Every id that ends a reply."""
    noise: Targets | None


@dataclass(frozen=True, slots=True)
class RankProof:
    """A worker's own proof, and what ranks must agree on."""

    proof: str
    """Proof of its engine and learner, as JSON."""
    shift: float | None
    """Distance of the policy between probes: see Prover.shift."""
    held: Mapping[str, TensorPrint]
    """Fingerprints of what its engine samples with."""
    truth: Mapping[str, TensorPrint]
    """Fingerprints of the tensors that it owns, made before any other rank got them."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A learner's part of a checkpoint, its tensors in files."""

    file: Literal["model.safetensors", "adapter_model.safetensors"]
    texts: Mapping[str, str]
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion of a worker. Its request is known by the id."""

    id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    version: int
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Rows:
    """Token ids of some sequences."""

    ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Numbers for the tokens of some sequences."""

    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Numerics:
    """Effect of a numeric on the learner."""

    layers: int
    excluded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a worker."""

    kind: str
    """Name of its class."""
    what: str
    where: str
    fix: str
    when: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Stands for the results of a worker that only sampled, and is no more."""

    error: LockstepError


class Workers(Protocol):
    """The workers of a run, each with a model; every call ends in time or raises.

    Raises the first error that a worker met, WorkerError for an unexpected one, WorkerLost for a worker that died or fell silent;
    then all workers have been ended.
    """

    size: int

    def call(self, method: str, *arguments: Plain) -> list[Plain]:
        """Call a method of every worker with the same arguments; returns the results by rank."""

    def call_one(self, rank: int, method: str, *arguments: Plain) -> Plain:
        """Call a method of one worker."""

    def start(self, rank: int, method: str, *arguments: Plain) -> None:
        """Begin a call; a worker takes its calls one after the other."""

    def revive(self, rank: int, lost: Lost) -> None:
        """Put another worker in place of one that is lost. Raises its error if it cannot be replaced."""

    def results(self, seconds: float) -> dict[int, Plain]:
        """Return results of started calls by rank, each worker's oldest, waiting at most so long for the first one.

        Lost stands for those of a worker that was replaced since.
        """

    def close(self) -> None:
        """End all workers."""
