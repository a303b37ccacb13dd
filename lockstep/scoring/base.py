"""Checks that an evaluation measures the base model that the run began from."""

from __future__ import annotations

from lockstep.errors import EvaluationError
from lockstep.scoring.targets import Target
from lockstep.scoring.workers import Session
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events
from lockstep.types import Proof


def base_fingerprint(session: Session, proof: Proof) -> str:
    """Return the fingerprint of training's start: for an adapter the base alone, since its start depends on the seed."""
    return session.base or proof.fingerprint


def require_own_base(target: Target, session: Session, proof: Proof) -> None:
    """Raise EvaluationError if a run's base, proven by `proof`, is not the base that the run began from.

    A checkpoint of full training fits any model of its shape, and step 0 has no checkpoint: only the run's record can tell.
    """
    if target.run is None or target.trained is None:
        return
    run = RunDirectory.open(target.run)
    starts = [event.facts for event in read_events(run) if event.kind == "sync" and event.step == 0]
    began = starts[-1].get("base") if starts else None  # of the last attempt that began at step 0
    if began is None or run.manifest().get("numerics") != session.policy.numerics:
        return  # an older version; or a precision in which the weights differ
    if (found := base_fingerprint(session, proof)) != began:
        without = ", or evaluate it without its base (--no-base)" if target.checkpoint is not None else ""
        raise EvaluationError(
            f"the weights of {target.recipe.model.path} have the fingerprint {found}, but the run began from {began}",
            where=str(target.run),
            fix=f"set model.path to the model that the run began from{without}",
        )
