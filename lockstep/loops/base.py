"""Proof that an adapter run never changed its base: the frozen weights' fingerprint at the start and at the end."""

from __future__ import annotations

from torch import nn

from lockstep.errors import LearnerError
from lockstep.loops.journal import Journal
from lockstep.models.weights import frozen_names, named_weights
from lockstep.sync.fingerprint import Fingerprints, fingerprint


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
            where="the base under the adapter",
            fix="use no checkpoint of this run: they fit a base that no longer is; report what ran beside the training",
        )
    line = f"base unchanged: {len(before.tensors)} frozen tensors, fingerprint {before.combined} at start and end"
    journal.event("base", line, fingerprint=before.combined)
    journal.say(line)
