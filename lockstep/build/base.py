"""Fingerprints of the weights that a run began from."""

from __future__ import annotations

from torch import nn

from lockstep.errors import LearnerError
from lockstep.learner.adapters import facts_of
from lockstep.models.weights import frozen_names, named_weights
from lockstep.sync.fingerprint import Fingerprints, fingerprint
from lockstep.types import Proof


def frozen_print(model: nn.Module) -> Fingerprints | None:
    """Fingerprints of the weights that training must not change; None if all are trained."""
    frozen = frozen_names(model)
    return fingerprint((name, tensor) for name, tensor in named_weights(model) if name in frozen) if frozen else None


def require_unchanged(model: nn.Module, before: Fingerprints) -> str:
    """Say that the frozen weights are what they were. Raises LearnerError naming the tensors that are not."""
    after = frozen_print(model)
    now = after.tensors if after else {}
    changed = sorted(name for name in before.tensors.keys() | now.keys() if before.tensors.get(name) != now.get(name))
    if changed:
        raise LearnerError(
            f"{len(changed)} frozen weights changed in this run, the first is {changed[0]}",
            where="the base under the adapter",
            fix="use no checkpoint of this run: they fit a base that no longer is; report what ran beside the training",
        )
    return f"base unchanged: {len(before.tensors)} frozen tensors, fingerprint {before.combined} at start and end"


def base_print(model: nn.Module, proof: Proof) -> str:
    """Fingerprint of what is trained from: of an adapter the base alone, since its own start depends on the seed."""
    facts = facts_of(model)
    return proof.fingerprint if facts is None else facts.base.fingerprint
