"""What a run began from: proof that adapters never changed it, and that an evaluation's base is it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lockstep.errors import EvaluationError, LearnerError
from lockstep.learner.adapters import facts_of
from lockstep.models.weights import frozen_names, named_weights
from lockstep.sync.fingerprint import Fingerprints, fingerprint
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events
from lockstep.types import Proof

if TYPE_CHECKING:
    from lockstep.loops.journal import Journal
    from lockstep.loops.target import Rig, Target


def frozen_print(model: nn.Module) -> Fingerprints | None:
    """Fingerprints of the weights that training must not change; None if all are trained."""
    frozen = frozen_names(model)
    return fingerprint((name, tensor) for name, tensor in named_weights(model) if name in frozen) if frozen else None


def require_unchanged(model: nn.Module, before: Fingerprints | None, journal: Journal) -> None:
    """Say in the run's record that the base is what it was. Raises LearnerError naming the tensors that are not."""
    if before is None:
        return
    after = frozen_print(model)
    now = after.tensors if after else {}
    changed = sorted(name for name in before.tensors.keys() | now.keys() if before.tensors.get(name) != now.get(name))
    if changed:
        raise LearnerError(
            f"{len(changed)} frozen weights changed in this run, the first is {changed[0]}",
            where="weights that training leaves as they are",
            fix="use no checkpoint of this run: they fit a base that no longer is; report what ran beside the training",
        )
    line = f"base unchanged: {len(before.tensors)} frozen tensors, fingerprint {before.combined} at start and end"
    journal.event("base", line, fingerprint=before.combined)
    journal.say(line)


def base_print(model: nn.Module, proof: Proof) -> str:
    """Fingerprint of what is trained from: of an adapter the base alone, since its own start depends on the seed."""
    facts = facts_of(model)
    return proof.fingerprint if facts is None else facts.base.fingerprint


def require_own_base(target: Target, rig: Rig, proof: Proof) -> None:
    """Raise EvaluationError if a run's base, which `proof` is of, is not what the run began from.

    A checkpoint of full training fits any model of its shape, and step 0 has no checkpoint: only the run's record tells.
    """
    if target.run is None or target.trained is None:
        return
    run = RunDirectory.open(target.run)
    starts = [event.facts for event in read_events(run) if event.kind == "sync" and event.step == 0]
    began = starts[-1].get("base") if starts else None  # of the last attempt that began anew
    if began is None or run.manifest().get("numerics") != rig.policy.numerics:
        return  # of an older version; or in a precision in which the weights are others
    if (found := base_print(rig.policy.model, proof)) != began:
        without = ", or evaluate it without its base (--no-base)" if target.checkpoint is not None else ""
        raise EvaluationError(
            f"{target.recipe.model.path} has weights {found}; the run began from {began}",
            where=str(target.run),
            fix=f"give the model that it was trained from as model.path{without}",
        )
