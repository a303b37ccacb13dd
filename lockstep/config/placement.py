"""Settings of where a run computes: in its own process, or in several workers on this machine."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from lockstep.config.section import TAG, Section


class Local(Section):
    """Everything in one process, on one GPU or on the CPU."""

    kind: Literal["local"] = "local"


class _Workers(Section):
    restarts: int = Field(default=2, ge=0)
    """Most times that a run goes on by itself after a worker died or fell silent; then it ends with exit code 75. It goes on from
    its newest checkpoint; a worker that only samples is replaced, and no step is lost."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for a worker's answer, in seconds, until its kind of work has been seen; then five times the longest seen, at
    least 120."""


class Colocated(_Workers):
    """Workers that all train and sample, one for each GPU.

    Each has the whole weights and a share of the optimizer. Weights, samples and metrics do not depend on their number."""

    kind: Literal["colocated"] = "colocated"
    gpus: int = Field(default=2, ge=1, le=64)
    """Number of workers: GPUs of this machine, or processes on a CPU."""

    @property
    def trainers(self) -> int:
        return self.gpus

    @property
    def samplers(self) -> int:
        """Number of workers that only sample."""
        return 0


class Split(_Workers):
    """Workers that train, and others that sample, one for each GPU.

    They work in turn: a step is sampled with the weights of the last, so the result is that of one process."""

    kind: Literal["split"] = "split"
    train: int = Field(default=1, ge=1, le=64)
    """Number of workers that train, each with the whole weights and a share of the optimizer."""
    rollout: int = Field(default=1, ge=1, le=64)
    """Number of workers that sample."""

    @property
    def trainers(self) -> int:
        return self.train

    @property
    def samplers(self) -> int:
        return self.rollout


Placement: TypeAlias = Annotated[Local | Colocated | Split, Field(discriminator=TAG)]
