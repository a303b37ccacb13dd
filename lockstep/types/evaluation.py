"""Scores, and the conditions that they depend on."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.types.weights import Proof


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that a score depends on. Scores whose conditions differ in more than `weights` are compared only on request."""

    weights: str
    """Fingerprint of the weights (Proof.fingerprint)."""
    model: str
    numerics: str
    """Precision of the measurement. Example: "bf16"."""
    engine: str
    mode: str
    """Example: "greedy", "sampled(T=1)"."""
    task: str
    data_hash: str
    """Hash of the ids, messages and answers of the items."""
    template_hash: str
    """Hash of the chat template, system text, examples and suffix."""
    max_tokens: int
    seed: int
    reasoning_effort: str | None = ""
    """Thinking setting given to the chat template. Example: "reasoning_effort=high". None: a record that does not say."""
    prompt_suffix: str | None = ""
    """Text after every question; it is also part of template_hash. None: a record that does not say."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One reply of an evaluation."""

    id: str
    sample: int
    correct: bool | None
    """None if the reply could not be scored."""
    reward: float | None
    extracted: str | None
    answer: str
    text: str
    truncated: bool
    """True if the engine's finish reason is LENGTH; never guessed from the text."""
    tokens: int
    method: str = ""
    """Method by which the answer was read (Grade.method)."""
    boxed: bool | None = None
    """True if it has an answer in \\boxed{}; None if the verifier does not say."""
    error: str | None = None
    """Reason why the reply could not be scored."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One number of a score, by its own estimator. Example: Estimate("pass@8", 0.495, 0.031, 0.435, 0.555, 202)"""

    name: str
    """avg@n: mean of n samples; pass@k: any of k is correct, unbiased; maj@n: the majority's answer. With one sample pass@1 is
    the grade.
    """
    value: float
    se: float | None
    """Standard error over items; None for a single item."""
    low: float
    high: float
    """Upper end of the 95 % interval."""
    items: int
    """Items with enough scored samples."""


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one evaluation."""

    conditions: Conditions
    accuracy: float
    """The mode's first estimate: by default the share of correct replies, where each item has the same weight."""
    low: float
    high: float
    """Upper end of the 95 % interval (Wilson for one sample per item, else bootstrap over items)."""
    items: int
    samples: int
    """Replies per item."""
    unscored: int
    truncated: float
    mean_tokens: float
    step: int
    """Trained steps of the weights; 0 is the base model."""
    version: int
    proof: Proof | None
    results: tuple[ItemResult, ...]
    seconds: float
    estimates: tuple[Estimate, ...] = ()
    """All numbers computed from these replies; the first is `accuracy`."""
    source: str = ""
    """Name of the target, as the user gave it. Example: "runs/mine at step 40"."""
    workers: int = 1
    """Number of workers whose engines it was dealt to. The result does not depend on it."""

    @property
    def se(self) -> float | None:
        """Standard error of `accuracy`."""
        return self.estimates[0].se if self.estimates else None
