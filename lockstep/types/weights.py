"""Settings of an engine's forward pass, facts about a learner, and the proof that both have the same weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormNoise:
    """Gaussian noise on norm weights: w + σ·scale·z, z drawn from (seed, name) alone."""

    sigma: float
    seed: int
    """Seed from the run's seed and the version of the weights: the same on every rank and in every rerun."""
    targets: tuple[str, ...]
    """Full names of the norm weights (as in `weights()`), sorted."""
    scales: tuple[float, ...]
    """Factor on sigma for each target."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Settings of an engine's forward pass. Example: Forward("mxfp4-w4a4")"""

    numerics: str = ""
    """A Numeric of config.numerics; empty means the precision of the weights."""
    noise: NormNoise | None = None


@dataclass(frozen=True, slots=True)
class ForwardReport:
    """Effect of `set_forward`."""

    quantised_layers: int = 0
    noisy_norms: int = 0
    noise_share: float = 0.0
    """‖w' - w‖ / ‖w‖ over all noisy norms together, measured in the weights."""
    noise_lost: float = 0.0
    """Share of the norms' numbers that rounding to the weights' dtype left unchanged."""


@dataclass(frozen=True, slots=True)
class LearnerFacts:
    """Facts about a learner, as text."""

    device: str
    lines: tuple[str, ...]
    """Lines that say which weights are trained and how updates are made."""
    base: str
    """Fingerprint of the frozen base under an adapter; empty if all weights are trained."""
    trained: int
    """Number of weights that are trained."""
    microbatch_tokens: int
    """Most tokens of a micro-batch."""
    share_prompts: bool
    """True if a micro-batch holds the prompt of a group once."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Teacher-forced log-probabilities of fixed sequences: learner against engine, absolute differences in nats."""

    tokens: int
    mean: float
    p99: float
    max: float
    tolerance: float
    """Upper limit of `mean`."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Evidence that the engine's weights are the learner's. Stored with every step and every score."""

    version: int
    fingerprint: str
    """Fingerprint of all weights together, 16 hex digits; identifies the weights across runs and checkpoints."""
    tensors: int
    bytes: int
    mismatched: tuple[str, ...]
    """Names of tensors that differ, with the reason. Empty in a proof that passed."""
    changed: int
    """Number of tensors that differ from the last proof's; -1 in a first proof."""
    probe: Probe | None
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.mismatched and (self.probe is None or self.probe.mean <= self.probe.tolerance)
