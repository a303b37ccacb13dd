"""Writes a proof as one line of text, and as JSON. Does not import torch."""

from __future__ import annotations

import math

from lockstep import codec
from lockstep.errors import SyncError
from lockstep.types import Metrics, Proof

VERSION = "version:"
"""Beginning of a mismatch of versions in Proof.mismatched; the other entries begin with a tensor's name."""
WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that JSON lacks and a failed probe can have."""


def proof_line(proof: Proof) -> str:
    """Return a line: "sync v17: 339/339 tensors equal, 210 changed, 6.2 ms, probe mean 0.011 of at most 0.03, p99 0.06"."""
    unequal = sum(not entry.startswith(VERSION) for entry in proof.mismatched)
    parts = [
        f"{proof.tensors - unequal}/{proof.tensors} tensors equal",
        "first proof" if proof.changed < 0 else f"{proof.changed} changed",
        _duration(proof.seconds),
    ]
    if probe := proof.probe:
        limit = f"of at most {probe.tolerance:.2g}" if probe.mean <= probe.tolerance else f"ABOVE {probe.tolerance:.2g}"
        parts.append(f"probe mean {probe.mean:.2g} {limit}, p99 {probe.p99:.2g}")
    head = f"sync v{proof.version}: " if proof.passed else f"sync v{proof.version} FAILED: "
    return "; ".join([head + ", ".join(parts), *proof.mismatched])


def require_exact(metrics: Metrics, step: int) -> None:
    """Raise SyncError if a sampled token's log-probability was not training's to the last bit."""
    gap = metrics.get("mismatch/max_abs_dlogp", 0.0)
    if not gap <= 0:
        raise SyncError(
            "numerics.exact failed: log-probabilities of sampled tokens differ from those in training by up to "
            f"{gap:.3g}",
            where=f"step {step}",
            fix="start a new run with numerics.exact=false, and report this error with the versions of torch and Triton",
        )


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def proof_metrics(proof: Proof, shift: float | None) -> Metrics:
    """Return the metrics of a push; `shift` is how far the policy moved by the probe's tokens (Prover.shift)."""
    metrics = {
        "sync/seconds": proof.seconds,
        "sync/tensors": float(proof.tensors),
        "weights/changed_tensors": float(proof.changed),
    }
    if proof.probe is not None:
        metrics |= {"sync/probe_mean": proof.probe.mean, "sync/probe_max": proof.probe.max}
    return metrics if shift is None else metrics | {"sync/probe_shift": shift}


def to_json(proof: Proof) -> dict[str, object]:
    """Return a dict that json.dumps(…, allow_nan=False) accepts and from_json turns into an equal proof."""
    data: dict[str, object] = codec.to_json(proof)
    if proof.probe:
        numbers: dict[str, float] = codec.to_json(proof.probe)
        data["probe"] = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    return data


def from_json(data: object) -> Proof:
    """Read what to_json wrote. Raises SyncError naming a field that is unknown, missing or of another type."""
    match data:
        case {"probe": dict(probe), **rest}:
            named = {
                name: WORDS.get(value, value) if isinstance(value, str) else value for name, value in probe.items()
            }
            data = {**rest, "probe": named}
    try:
        proof = codec.from_json(Proof, data)
    except codec.CodecError as error:
        raise SyncError(f"proof.{error}", fix="use a proof that this version of Lockstep wrote") from error
    if len(proof.fingerprint) != 16 or not set(proof.fingerprint) <= set("0123456789abcdef"):
        raise SyncError(
            f"proof.fingerprint: {proof.fingerprint!r} is not 16 hex digits",
            fix="use a proof that this version of Lockstep wrote",
        )
    return proof
