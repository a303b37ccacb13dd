"""Records that the driver and its workers send to each other, and the files by which tensors travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.noise.targets import Targets
from lockstep.sync.fingerprint import Fingerprints, TensorPrint
from lockstep.types import LearnerFacts, Proof

GIVEN, WEIGHTS, PART = "given.safetensors", "weights.safetensors", "part_{rank}.safetensors"
"""Files in the folder of the workers: what the driver gives them, the weights of one, and each one's part of an optimizer."""


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

    proof: Proof
    """Proof of its engine and learner."""
    shift: float | None
    """Distance of the policy between probes: see Prover.shift."""
    held: Fingerprints
    """Fingerprints of what its engine samples with."""
    truth: Mapping[str, TensorPrint]
    """Fingerprints of the tensors that it owns, made before any other rank got them."""
