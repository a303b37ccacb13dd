"""The proof that an engine's weights are the learner's: versions, fingerprints of all tensors, a log-probability probe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from lockstep.config.schema import Sync
from lockstep.errors import SyncError
from lockstep.sync.compare import Fault, Mismatch, compare, explain
from lockstep.sync.fingerprint import Fingerprinter, Fingerprints, fingerprint, splitmix64
from lockstep.sync.merged import MergedLearner
from lockstep.sync.record import VERSION
from lockstep.types import Learner, Probe, Proof, RolloutEngine, TokenIds, WeightStream

Numerics: TypeAlias = Literal["fp32", "bf16", "exact"]
TOLERANCE: dict[Numerics, float] = {"fp32": 1e-4, "bf16": 0.03, "exact": 0.0}
"""Largest mean |Δ log-probability| of a probe. Synced dense bf16 models show 0.010-0.018, unsynced 0.2 (TRL issue 5312)."""
ROUNDINGS = 2.0
"""Tolerance factor for an engine with other kernels and for mixtures of experts, relative to the model's own rounding noise."""
PROBE_KEY = 0x70726F6265  # "probe"


@dataclass(frozen=True, slots=True)
class ProofSettings:
    """Sequences of the probe and its limit. Example: ProofSettings(((17, 4, 29), (8, 8, 3)), 1e-4)"""

    sequences: tuple[TokenIds, ...]
    tolerance: float
    """Largest mean |Δ log-probability|, nats."""


@runtime_checkable
class Remote(Protocol):
    """An engine in another process: it fingerprints its own weights, and sends tensors only for inspection."""

    def fingerprints(self) -> Fingerprints: ...

    def weights(self, only: Collection[str] = ()) -> WeightStream:
        """Return these tensors, all if none is named."""


@runtime_checkable
class Sleeper(Protocol):
    """An engine that frees memory between rollouts."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Readers:
    """The fingerprinters of a run. `shared`: the engine claims to read the learner's own tensors."""

    learner: Fingerprinter
    engine: Fingerprinter
    shared: bool = False
    identity: Fingerprinter | None = None
    """Fingerprinter of the learner's weights as they are saved, if the compared ones are merged (merged.py)."""


@dataclass(frozen=True, slots=True)
class Proven:
    """A proof, and the data that the next one needs."""

    proof: Proof
    fingerprints: Fingerprints
    """Fingerprints of the learner."""
    probed: tuple[float, ...] = ()
    """The learner's log-probabilities of the probe's tokens; empty without a probe."""


def proof_settings(
    settings: Sync,
    vocab: int,
    numerics: Numerics,
    special: Collection[int] = (),
    rounding: Callable[[Sequence[TokenIds]], float] | None = None,
) -> ProofSettings:
    """Return fixed probe sequences for a vocabulary of `vocab` ids; `special` ids are left out unless there are no others.

    `rounding`, for an engine with other kernels than the learner's and for mixtures of experts, returns how far rounding alone
    moves this model's log-probabilities of given sequences: some bf16 models differ from themselves by more than TOLERANCE.
    """
    avoid = frozenset(special) if frozenset(special) < frozenset(range(vocab)) else frozenset()
    drawn = (splitmix64(PROBE_KEY, place) % vocab for place in count())
    ids = (token for token in drawn if token not in avoid)
    sequences = tuple(tuple(islice(ids, settings.probe_tokens)) for _ in range(settings.probe_sequences))
    tolerance = TOLERANCE[numerics]
    if numerics == "bf16" and rounding is not None:
        tolerance = max(tolerance, ROUNDINGS * rounding(sequences))
    return ProofSettings(sequences, tolerance)


def prove(
    learner: Learner,
    engine: RolloutEngine,
    previous: Fingerprints | None,
    settings: ProofSettings,
    probe: bool,
    readers: Readers | None = None,
) -> Proven:
    """Compare versions, all tensors and, with `probe`, log-probabilities. Differences are recorded in the proof, not raised.

    `previous` are the fingerprints of the last proof that passed, None for the first. A proof with a probe reads all tensors,
    one without uses the readers' cached fingerprints of frozen ones. Raises SyncError if a side's answer is malformed.
    """
    start = time.perf_counter()
    if isinstance(engine, Sleeper):
        engine.wake()  # what is proven is what will sample: waking has brought old weights back elsewhere
    readers = readers or Readers(Fingerprinter(), Fingerprinter())
    if probe:
        readers.learner.refresh_frozen()
        readers.engine.refresh_frozen()
        if readers.identity:
            readers.identity.refresh_frozen()
    if readers.shared:
        ours, theirs, faults = _read_shared(learner, engine, readers)
    else:
        ours, theirs, faults = readers.learner.read(learner.weights()), _read_engine(engine, readers.engine), ()
    differing = compare(ours, theirs, previous)
    if differing:
        both = [entry.name for entry in differing if entry.name in theirs.tensors]
        differing = explain(differing, learner.weights(), _look_at(engine, both))
    named = {entry.name for entry in differing}
    thawed = (Mismatch(name, Fault.THAWED, "it changed since the first proof") for name in readers.learner.thawed)
    probed, ours_probed = _probe(learner, engine, settings) if probe else (None, ())
    tensor_faults = (*differing, *(fault for fault in (*faults, *thawed) if fault.name not in named))
    proof = Proof(
        version=learner.version,
        fingerprint=_identity(learner, readers, ours).combined,
        tensors=len(ours.tensors.keys() | theirs.tensors.keys()),
        bytes=ours.bytes,
        mismatched=(*_version_lag(learner, engine), *map(str, tensor_faults)),
        changed=ours.changed_since(previous) if previous else -1,
        probe=probed,
        seconds=time.perf_counter() - start,
    )
    return Proven(proof, ours, ours_probed)


def _read_engine(engine: RolloutEngine, reader: Fingerprinter) -> Fingerprints:
    return engine.fingerprints() if isinstance(engine, Remote) else reader.read(engine.weights())


def _look_at(engine: RolloutEngine, names: Sequence[str]) -> WeightStream:
    """Yield at least these tensors of the engine; none of another process's if nothing is named."""
    if isinstance(engine, Remote):
        return engine.weights(names) if names else iter(())
    return engine.weights()


def _identity(learner: Learner, readers: Readers, compared: Fingerprints) -> Fingerprints:
    """Return fingerprints of the weights as a checkpoint holds them: merging an adapter does not change them."""
    if readers.identity is None or not isinstance(learner, MergedLearner):
        return compared
    return readers.identity.read(learner.learner.weights())


def _version_lag(learner: Learner, engine: RolloutEngine) -> tuple[str, ...]:
    if learner.version == engine.version:
        return ()
    return (f"{VERSION} engine {engine.version}, learner {learner.version}",)


def _read_shared(
    learner: Learner, engine: RolloutEngine, readers: Readers
) -> tuple[Fingerprints, Fingerprints, tuple[Mismatch, ...]]:
    """Read each shared tensor once. A tensor of one element (an adapter's scaling) may be a separate value on each side."""
    mine, yours = _collect(learner.weights()), _collect(engine.weights())
    ours = readers.learner.read(iter(mine.items()))
    apart = {name: t for name, t in yours.items() if name not in mine or not _same_storage(mine[name], t)}
    shared = {name: ours.tensors[name] for name in yours.keys() - apart.keys()}
    theirs = Fingerprints({**shared, **fingerprint(iter(apart.items())).tensors})
    faults = tuple(
        Mismatch(name, Fault.NOT_SHARED, "the engine has a copy of it")
        for name, tensor in apart.items()
        if name in mine and tensor.numel() > 1
    )
    return ours, theirs, faults


def _collect(stream: WeightStream) -> dict[str, Tensor]:
    pairs = list(stream)
    tensors = dict(pairs)
    if len(tensors) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise SyncError(
            f"the weight stream has {twice} twice", fix="yield each tensor once, and tied tensors by one name"
        )
    return tensors


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and (
        one.is_set_to(other)  # says the same in one call, but not of memory that two storages share
        or (one.data_ptr(), one.device, one.shape, one.stride())
        == (other.data_ptr(), other.device, other.shape, other.stride())
    )


def _probe(learner: Learner, engine: RolloutEngine, settings: ProofSettings) -> tuple[Probe, tuple[float, ...]]:
    """Score the fixed sequences on both sides; returns the probe and the learner's values.

    Raises SyncError if a side returns another number of values than requested.
    """
    ours = _flatten(learner.logprobs(settings.sequences), settings.sequences, "learner.logprobs")
    theirs = _flatten(engine.score(settings.sequences), settings.sequences, "engine.score")
    differences = sorted((abs(a - b) for a, b in zip(ours, theirs, strict=True)), key=_nan_last)
    probe = Probe(
        tokens=len(differences),
        mean=math.fsum(differences) / len(differences),
        p99=differences[math.ceil(0.99 * len(differences)) - 1],
        max=differences[-1],
        tolerance=settings.tolerance,
    )
    return probe, tuple(ours)


def _nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _flatten(rows: Sequence[Sequence[float]], sequences: Sequence[TokenIds], where: str) -> list[float]:
    lengths, expected = [len(row) for row in rows], [len(ids) - 1 for ids in sequences]
    if lengths != expected:
        raise SyncError(
            f"the call returned {lengths} log-probabilities for sequences of {[len(ids) for ids in sequences]} tokens",
            where=where,
            fix="return one value for each token except the first",
        )
    return [value for row in rows for value in row]
