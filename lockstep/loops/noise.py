"""Applies noise during the rollouts of a step, and proves that it is removed before anything else reads the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.errors import DEFECT, SyncError
from lockstep.noise.schedule import Stage, stage_of
from lockstep.noise.targets import Targets
from lockstep.rollout.precision import computing
from lockstep.seeds import seed_for
from lockstep.sync.fingerprint import TensorPrint, fingerprint
from lockstep.sync.proof import Remote
from lockstep.types import ForwardReport, Metrics, NormNoise, RolloutEngine


@contextmanager
def noisy_rollouts(parts: Parts, recipe: Recipe, step: int) -> Iterator[Metrics]:
    """Sample with the noise of `step` inside the block; yields the metrics of the noise.

    Afterwards the engine computes as before, and the fingerprints of its norms equal the learner's. Raises SyncError if they do
    not. If the body raises, noise is removed as far as the engine still can.
    """
    targets = parts.noise
    if targets is None:
        yield {}
        return
    stage, engine = stage_of(recipe, step), parts.engine
    if not stage.sigma:
        yield _metrics(stage, ForwardReport())
        return
    clean = dict(parts.learner.fingerprint(only=targets.names).tensors)
    seed = seed_for(recipe.seed, "noise", parts.learner.version)
    noise = NormNoise(stage.sigma, seed, targets.names, targets.scales)
    with computing(engine, replace(engine.forward, noise=noise)) as report:
        yield _metrics(stage, report)
    _check_removed(engine, clean, targets)


def _check_removed(engine: RolloutEngine, clean: dict[str, TensorPrint], targets: Targets) -> None:
    """Check that the engine's norms equal the learner's again."""
    if isinstance(engine, Remote):
        found = engine.fingerprints().tensors
    else:
        wanted = frozenset(targets.names)
        found = fingerprint((name, w) for name, w in engine.weights() if name in wanted).tensors
    wrong = [name for name in targets.names if found.get(name) != clean.get(name)]
    if engine.forward.noise is not None or wrong:
        raise SyncError(
            f"the rollout engine's noise was not removed: {len(wrong)} of {len(targets.names)} normalisation weights differ "
            "from the learner's" + (f", the first is {wrong[0]}" if wrong else ""),
            where="noise after a rollout",
            fix=f"use no score of this engine, and resume from the last checkpoint; {DEFECT}",
        )


def _metrics(stage: Stage, report: ForwardReport) -> Metrics:
    return {
        "noise/sigma": stage.sigma,
        "noise/stage": float(stage.index),
        "noise/norms": float(report.noisy_norms),
        "noise/share": report.noise_share,
        "noise/lost": report.noise_lost,
    }
