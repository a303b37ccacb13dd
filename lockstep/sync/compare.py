"""Compares the weights of learner and engine tensor by tensor, and names the kind of fault that a difference suggests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from lockstep.errors import SyncError
from lockstep.sync.fingerprint import INTEGERS, Fingerprints, TensorPrint
from lockstep.types import Proof, WeightStream

EXPLAINED = 16
"""Most differing tensors that are compared element by element; for more, the names are enough."""


class Fault(StrEnum):
    """Kind of a mismatch."""

    MISSING = "missing"
    EXTRA = "extra"
    DTYPE = "dtype"
    SHAPE = "shape"
    STALE = "stale"
    TRANSPOSED = "transposed"
    DIFFERS = "differs"
    NOT_SHARED = "not shared"
    THAWED = "not frozen"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One differing tensor. Example: Mismatch("lm_head.weight", Fault.STALE, "still the tensor of the last proof")"""

    name: str
    fault: Fault
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.fault}, {self.detail}"


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


def compare(learner: Fingerprints, engine: Fingerprints, previous: Fingerprints | None = None) -> tuple[Mismatch, ...]:
    """Return the tensors in which the sides differ, by name. `previous` is the last proof's, to recognise a stale tensor."""
    if learner.tensors == engine.tensors:
        return ()
    known = previous.tensors if previous else {}
    names = sorted(learner.tensors.keys() | engine.tensors.keys())
    faults = (_fault(name, learner.tensors.get(name), engine.tensors.get(name), known.get(name)) for name in names)
    return tuple(fault for fault in faults if fault)


def differing(truth: Fingerprints, held: Sequence[Fingerprints]) -> list[Mismatch]:
    """Return the tensors of each rank, in order, that are not the true ones."""
    return [
        replace(fault, detail=f"{fault.detail} on rank {rank}")
        for rank, prints in enumerate(held)
        for fault in compare(truth, prints)
    ]


def agreed(held: Sequence[Fingerprints]) -> Fingerprints:
    """Return what all ranks hold. Raises SyncError if they hold different weights."""
    if faults := differing(held[0], held):
        what = f"workers hold different weights: {'; '.join(map(str, faults[:8]))}"
        raise SyncError(what, fix="resume from the last checkpoint")
    return held[0]


def _fault(
    name: str, expected: TensorPrint | None, found: TensorPrint | None, before: TensorPrint | None
) -> Mismatch | None:
    if expected == found:
        return None
    if found is None:
        return Mismatch(name, Fault.MISSING, "the engine does not have it")
    if expected is None:
        return Mismatch(name, Fault.EXTRA, "the learner does not have it")
    if found.shape != expected.shape:
        return Mismatch(name, Fault.SHAPE, f"{list(found.shape)} instead of {list(expected.shape)}")
    if found.dtype != expected.dtype:
        return Mismatch(name, Fault.DTYPE, f"{found.dtype} instead of {expected.dtype}")
    if found == before:
        return Mismatch(name, Fault.STALE, "still the tensor of the last proof")
    return Mismatch(name, Fault.DIFFERS, "other values")


def explain(mismatches: Iterable[Mismatch], learner: WeightStream, engine: WeightStream) -> tuple[Mismatch, ...]:
    """Look at the elements of tensors that differ and add details: a transpose, swapped rows, a flipped bit, how many elements.

    Reads both streams again and holds the differing tensors of both, at most EXPLAINED of them.
    """
    listed = tuple(mismatches)
    unclear = [entry.name for entry in listed if entry.fault in (Fault.DIFFERS, Fault.SHAPE)][:EXPLAINED]
    if not unclear:
        return listed
    expected, found = _pick(unclear, learner), _pick(unclear, engine)
    both = expected.keys() & found.keys()
    return tuple(_look(entry, expected, found) if entry.name in both else entry for entry in listed)


def _pick(names: list[str], stream: WeightStream) -> dict[str, Tensor]:
    """Return the tensors' bits as integers, on the CPU, so that NaN equals itself."""
    wanted = frozenset(names)
    return {
        name: tensor.detach().view(INTEGERS[tensor.element_size()]).cpu() for name, tensor in stream if name in wanted
    }


def _look(entry: Mismatch, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Mismatch:
    want, have = expected[entry.name], found[entry.name]
    if want.dim() == 2 and want.dtype == have.dtype and torch.equal(want.T, have):
        return replace(entry, fault=Fault.TRANSPOSED, detail="the learner's tensor with rows and columns exchanged")
    if want.shape != have.shape or want.dtype != have.dtype:
        return entry
    places = torch.nonzero(want != have)
    if not len(places):
        return entry
    return replace(entry, detail=_where(want, have, places))


def _where(want: Tensor, have: Tensor, places_DK: Tensor) -> str:
    """Describe the places. `places_DK` are the indices of the D elements that differ."""
    count, first = len(places_DK), places_DK[0].tolist()
    if count == 1 and want.numel() > 1:
        index = tuple(first)
        flipped = (int(want[index].item()) ^ int(have[index].item())) & ((1 << 8 * want.element_size()) - 1)
        if flipped.bit_count() == 1:
            return f"one bit of element {first}"
        return f"one element, {first}"
    if want.dim() == 2:
        rows = sorted(set(places_DK[:, 0].tolist()))
        if len(rows) == 2 and torch.equal(want[rows], have[rows[::-1]]):
            return f"rows {rows[0]} and {rows[1]} are swapped"
    return f"{count} of {want.numel()} elements, the first is {first}"
