"""The two transports of weights to an engine, each followed by a proof."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal, Protocol, assert_never

from lockstep.config.schema import Sync
from lockstep.errors import SyncError
from lockstep.sync.control import control_copy, control_shared
from lockstep.sync.fingerprint import Fingerprinter, Fingerprints
from lockstep.sync.merged import MergedLearner, merged_names
from lockstep.sync.proof import Numerics, ProofSettings, Readers, proof_settings, prove
from lockstep.sync.record import proof_line
from lockstep.types import Learner, Proof, RolloutEngine, TokenIds, WeightStream, WeightSync

log = logging.getLogger(__name__)


class Prover:
    """Makes the proofs of a run: remembers the last proof's fingerprints, frozen tensors, and when a probe is due."""

    def __init__(
        self,
        settings: Sync,
        probe: ProofSettings,
        frozen: frozenset[str],
        *,
        shared: bool,
        merge: frozenset[str] | None = None,
    ) -> None:
        """Set up. `frozen` as in build_sync; with `merge` all tensors of the engine are read at every proof."""
        identity = None if merge is None else Fingerprinter(frozen)
        frozen = frozen if merge is None else merged_names(frozen, merge)
        self.frozen = frozen
        self.previous: Fingerprints | None = None
        self.shift: float | None = None
        """Distance of the learner's log-probabilities of the probe's tokens between the last two probes: mean |Δ| in nats, per
        version between them. None if the last proof had no probe, or no earlier version was probed.
        """
        self._probed: tuple[int, tuple[float, ...]] | None = None
        self._schedule, self.probe, self._pushes = settings, probe, 0
        self._readers = Readers(
            Fingerprinter(frozen), Fingerprinter(frozen if merge is None else frozenset()), shared, identity
        )

    def next_push(self) -> bool:
        """Count a push; returns True if its proof must include the probe."""
        place, self._pushes = self._pushes, self._pushes + 1
        return place < self._schedule.probe_first or place % self._schedule.probe_every == 0

    def prove(self, learner: Learner, engine: RolloutEngine, *, probe: bool, remember: bool = True) -> Proof:
        """Prove without raising. With `remember`, a proof that passes becomes the one that the next is compared with."""
        proven = prove(learner, engine, self.previous, self.probe, probe, self._readers)
        if remember and proven.proof.passed:
            self.previous = proven.fingerprints
        self.shift = self._moved(learner.version, proven.probed)
        return proven.proof

    def _moved(self, version: int, probed: tuple[float, ...]) -> float | None:
        if not probed:
            return None
        before, self._probed = self._probed, (version, probed)
        if before is None or version <= before[0]:
            return None
        return fmean(abs(now - then) for now, then in zip(probed, before[1], strict=True)) / (version - before[0])

    def settle(self, learner: Learner, engine: RolloutEngine, again: Callable[[], None], probe: bool) -> Proof:
        """Prove; on failure resync once and prove again with the probe. Raises SyncError if that fails too."""
        proof = self.prove(learner, engine, probe=probe)
        if not proof.passed:
            log.warning("%s; sending all weights again", proof_line(proof))
            again()
            proof = self.prove(learner, engine, probe=True)
        return _accept(proof, "after a second push" if not proof.passed else "")

    def verify(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Prove everything, frozen tensors and probe included, and send nothing. Raises SyncError if it fails."""
        return _accept(self.prove(learner, engine, probe=True), "")


class RunSync(WeightSync, Protocol):
    """A transport with what a run asks of it besides a push."""

    sent: int
    """Bytes sent by the last push."""

    @property
    def shift(self) -> float | None:
        """Distance of the policy between probes: see Prover.shift."""

    def verify(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Prove everything without changing anything: at the end of a run, before a score. Raises SyncError."""

    def negative_control(self, learner: Learner, engine: RolloutEngine) -> str:
        """Falsify one tensor, which the proof must notice; returns its name. Raises SyncError if the proof is blind."""


class _Proven:
    """Facts of the proofs, for both transports."""

    def __init__(self, prover: Prover) -> None:
        self._prover = prover

    @property
    def shift(self) -> float | None:
        """Distance of the policy between probes: see Prover.shift."""
        return self._prover.shift

    @property
    def probe(self) -> ProofSettings:
        """Sequences of the probe and its limit."""
        return self._prover.probe

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the last proof that passed."""
        assert self._prover.previous is not None, "nothing has been pushed"
        return self._prover.previous


class SharedSync(_Proven):
    """The engine reads the learner's own tensors: nothing is sent, and the proof checks that they are the same storage."""

    sent = 0
    """Bytes sent by the last push."""

    def push(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Give the engine the learner's version and prove it. Raises SyncError naming the tensors if the proof fails."""
        start = time.perf_counter()

        def load() -> None:
            engine.load(iter(()), learner.version)

        load()
        proof = self._prover.settle(learner, engine, load, self._prover.next_push())
        return replace(proof, seconds=time.perf_counter() - start)

    def verify(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Prove everything without changing anything: at the end of a run, before a score. Raises SyncError."""
        return self._prover.verify(learner, engine)

    def negative_control(self, learner: Learner, engine: RolloutEngine) -> str:
        """Run control_shared. Call once at start, after the first push. Raises SyncError if the proof is blind."""
        return control_shared(learner, engine, self._prover.frozen)


class CopySync(_Proven):
    """The engine owns its weights: they are streamed one tensor at a time, frozen ones only once.

    With `merge`, adapters are added into the weights that are sent and compared: the engine has none (merged.py).
    """

    def __init__(self, prover: Prover, *, merge: bool = False, dithered: bool = False) -> None:
        super().__init__(prover)
        self._merge, self._dithered = merge, dithered
        self.sent = 0
        """Bytes sent by the last push; 0 if version and fingerprint already matched."""

    def push(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Send the weights, unless they are there already, and prove it. Raises SyncError naming the tensors on failure."""
        start = time.perf_counter()
        learner = self._seen(learner)
        probe = self._prover.next_push()
        self.sent = 0
        if engine.version == learner.version and self._prover.previous is not None:
            proof = self._prover.prove(learner, engine, probe=probe)
            if proof.passed:
                return replace(proof, seconds=time.perf_counter() - start)

        def send_all() -> None:
            engine.load(self._counted(learner.weights(), frozenset()), learner.version)

        skipped = self._prover.frozen if self._prover.previous is not None else frozenset[str]()
        engine.load(self._counted(learner.weights(), skipped), learner.version)
        proof = self._prover.settle(learner, engine, send_all, probe)
        return replace(proof, seconds=time.perf_counter() - start)

    def verify(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Prove everything and send nothing: at the end of a run, before a score. Raises SyncError."""
        return self._prover.verify(self._seen(learner), engine)

    def negative_control(self, learner: Learner, engine: RolloutEngine) -> str:
        """Run control_copy. Call once at start, after the first push. Raises SyncError if the proof is blind."""
        learner = self._seen(learner)

        def check() -> Proof:
            return self._prover.prove(learner, engine, probe=False, remember=False)

        return control_copy(learner, engine, check, self._prover.frozen)

    def _seen(self, learner: Learner) -> Learner:
        """Return the learner with the weights that the engine should have."""
        return MergedLearner(learner, learner.version, self._dithered) if self._merge else learner

    def _counted(self, stream: WeightStream, skipped: frozenset[str]) -> WeightStream:
        for name, tensor in stream:
            if name not in skipped:
                self.sent += tensor.nbytes
                yield name, tensor


def build_sync(
    settings: Sync,
    *,
    vocab: int,
    numerics: Numerics,
    special: Collection[int] = (),
    frozen: frozenset[str] = frozenset(),
    transport: Literal["shared", "copy"] | None = None,
    merge: frozenset[str] | None = None,
    dithered: bool = False,
    rounding: Callable[[Sequence[TokenIds]], float] | None = None,
) -> SharedSync | CopySync:
    """Return the transport that the recipe selects.

    `vocab` is the number of token ids and `special` those that the probe leaves out; `numerics` sets its tolerance; `frozen`
    are the names of tensors in learner.weights() that no update changes (the base under an adapter). `transport` None takes
    that of the settings. `merge`, all names in learner.weights(), is for an engine that has no adapters (`dithered` as in
    `merged`), `rounding` for one with other kernels (see proof_settings).
    """
    probe = proof_settings(settings, vocab, numerics, special, rounding)
    transport = transport or settings.transport
    match transport:
        case "shared":
            return SharedSync(Prover(settings, probe, frozen, shared=True))
        case "copy":
            prover = Prover(settings, probe, frozen, shared=False, merge=merge)
            return CopySync(prover, merge=merge is not None, dithered=dithered)
        case other:
            assert_never(other)


def _accept(proof: Proof, when: str) -> Proof:
    if proof.passed:
        return proof
    if proof.probe and math.isnan(proof.probe.mean) and not proof.mismatched:
        raise SyncError(
            "learner and engine hold the same weights, but both compute NaN: the last update broke the weights",
            where=f"sync of version {proof.version}",
            fix="lower optimizer.lr, and start a new run from the beginning or from an earlier checkpoint (warm_start)",
        )
    if proof.probe and proof.probe.tolerance == 0 and not proof.mismatched:
        raise SyncError(
            "numerics.exact failed: learner and engine hold the same weights, but their log-probabilities of "
            f"the probe differ by {proof.probe.max:.3g} at most, {proof.probe.mean:.3g} on average",
            where=f"sync of version {proof.version}",
            fix="start a new run with numerics.exact=false, and report this error with the versions of torch and Triton",
        )
    names = [*proof.mismatched[:8], *([f"and {len(proof.mismatched) - 8} more"] if len(proof.mismatched) > 8 else [])]
    if proof.probe and not proof.probe.mean <= proof.probe.tolerance:
        names.append(f"probe: mean |Δ log-probability| {proof.probe.mean:.3g} above {proof.probe.tolerance:.3g}")
    raise SyncError(
        f"the engine's weights are not the learner's{' ' + when if when else ''}: " + "; ".join(names),
        where=f"sync of version {proof.version}",
        fix="use no sample and no score of this engine; resume from the last checkpoint and report the tensors named",
    )
