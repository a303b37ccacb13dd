"""Scores made of plain marks, for tests of what is done with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lockstep.evaluation.runner import score_of
from lockstep.types import Conditions, ItemResult, Probe, Proof, Score

CONDITIONS = Conditions(
    weights="a" * 16,
    model="toy",
    numerics="fp32",
    engine="native",
    mode="greedy",
    task="sums/id_probe/numeric",
    data_hash="d" * 16,
    template_hash="e" * 16,
    max_tokens=16,
    seed=0,
)
PROOF = Proof(
    version=3,
    fingerprint="a" * 16,
    tensors=2,
    bytes=64,
    mismatched=(),
    changed=-1,
    probe=Probe(tokens=8, mean=1e-7, p99=2e-7, max=3e-7, tolerance=1e-4),
    seconds=0.25,
)


def score(
    marks: Sequence[bool | None] | Sequence[Sequence[bool | None]],
    *,
    weights: str = "a" * 16,
    step: int = 0,
    **changes: object,
) -> Score:
    """A score with marks of item 0, 1, 2 …; a list of marks for an item is its samples."""
    samples = [list(m) if isinstance(m, list | tuple) else [m] for m in marks]
    results = tuple(
        ItemResult(f"item/{i}", s, ok, ok if ok is None else float(ok), None, "7", f"{weights[0]}: {i}.{s}", False, 4)
        for i, item in enumerate(samples)
        for s, ok in enumerate(item)
    )
    conditions = dataclasses.replace(CONDITIONS, weights=weights, **changes)  # type: ignore[arg-type]
    proof = dataclasses.replace(PROOF, fingerprint=weights)
    return score_of(results, conditions, max(map(len, samples)), step, proof, 1.5)
