"""Compares an exported folder, as plain transformers loads it, with the trained model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import lockstep
from lockstep.codec import from_json, to_json
from lockstep.errors import DEFECT, ExportError
from lockstep.export.check import Answer, Request

EXACT = 1e-4
"""Largest difference of a log-probability, in nats, of the same weights by two implementations in fp32."""
FACTOR_MEAN, FACTOR_MAX = 2.0, 3.0
"""Tolerance for a rounded model, as a multiple of the difference measured under random rounding errors."""
SECONDS = 7200.0
"""Longest time that the check of an export may take: far more than reading its files does, so that it ends one that hangs."""
SAME = 1e-6
"""Mean difference from the base up to which the two count as equal."""
Check: TypeAlias = Callable[[Request], Answer]
Logprobs: TypeAlias = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two models' log-probabilities on the probe, in nats."""

    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class Expected:
    """Facts of the model in training, measured before anything is read back."""

    trained: Logprobs
    base: Logprobs
    """Log-probabilities of the recipe's model before any training."""
    rounding: Difference | None
    """Difference that random rounding errors of the adapted weights make; None if nothing was rounded."""
    parameters: int
    tied: bool
    names: frozenset[str]
    """Names of the tensors that the files must hold; empty for an adapter's folder."""
    fingerprint: str
    """Fingerprint of the weights that were written; for an adapter's folder, of the base."""
    dtype: str
    ids: tuple[int, ...]
    chat_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome, for the card and the record."""

    trained: Difference
    """Export against the model that trained."""
    base: Difference
    """Export against its base."""
    tolerance: Difference
    parameters: int
    tied: bool
    tokens: int

    @property
    def equals_base(self) -> bool:
        return self.base.mean <= SAME

    @property
    def line(self) -> str:
        """Example: "verified on 188 tokens: off the trained model by 2.1e-06 at most (allowed 0.0001), off its base by 0.31"."""
        base = "it EQUALS THE BASE" if self.equals_base else f"off its base by {self.base.mean:.2g} on average"
        if not self.equals_base and self.base.mean <= self.tolerance.mean:
            base += ", which rounding alone could be (an adapter's export, --adapter, is not rounded)"
        return (
            f"verified on {self.tokens} tokens: off the trained model by {self.trained.mean:.2g} on average and "
            f"{self.trained.max:.2g} at most (allowed {self.tolerance.mean:.2g} and {self.tolerance.max:.2g}), {base}; "
            f"{self.parameters:,} parameters, {'tied' if self.tied else 'no tied'} head"
        )


def in_fresh_process(request: Request, seconds: float = SECONDS) -> Answer:
    """Ask `lockstep.export.check` in a process that has nothing of this one. Raises ExportError if it fails, or takes longer."""
    root = str(Path(lockstep.__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(to_json(request)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "lockstep.export.check", str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired as error:
            raise ExportError(
                f"plain transformers has not read the exported folder in {seconds:g} seconds, and was ended",
                where=request.folder,
                fix="nothing was exported; try again where disk or device are faster",
            ) from error
        if done.returncode or not answered.is_file():
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ExportError(
                f"plain transformers cannot load the exported folder: {reason}",
                where=request.folder,
                fix=f"nothing was exported; {DEFECT}",
            )
        return from_json(Answer, json.loads(answered.read_text(encoding="utf-8")))


def verify(expected: Expected, found: Answer, names: set[str], where: str) -> Verified:
    """Compare both sides. Raises ExportError with everything that is wrong."""
    problems = [*found.complaints]
    if expected.names and names != expected.names:
        lacks, extra = sorted(expected.names - names), sorted(names - expected.names)
        problems += [f"the files lack {_some(lacks)}"] if lacks else []
        problems += [f"the files have {_some(extra)}, which the model does not have"] if extra else []
    for what, one, other in (
        ("parameters", found.parameters, expected.parameters),
        ("tied head", found.tied, expected.tied),
        ("precision", found.dtype, expected.dtype),
        ("fingerprint of the weights", found.fingerprint, expected.fingerprint),
        ("ids of a text", found.ids, expected.ids),
        ("ids of a chat", found.chat_ids, expected.chat_ids),
    ):
        if one != other:
            problems.append(f"{what}: {_short(one)} instead of {_short(other)}")
    trained, base = difference(found.logprobs, expected.trained), difference(found.logprobs, expected.base)
    rounding = expected.rounding or Difference(0.0, 0.0)
    allowed = Difference(max(EXACT, FACTOR_MEAN * rounding.mean), max(EXACT, FACTOR_MAX * rounding.max))
    if not (trained.mean <= allowed.mean and trained.max <= allowed.max):
        moved = difference(expected.trained, expected.base)
        problems.append(
            f"log-probabilities differ from the trained model's by {trained.mean:.3g} on average and {trained.max:.3g} at most; "
            f"{allowed.mean:.2g} and {allowed.max:.2g} are allowed (training changed them by {moved.mean:.3g})"
        )
    if problems:
        raise ExportError(
            "the exported folder is not the trained model: " + "; ".join(problems),
            where=where,
            fix="nothing was exported; check that model.path is still the model that the run began with; if it is, "
            + DEFECT,
        )
    tokens = sum(len(row) for row in found.logprobs)
    return Verified(trained, base, allowed, found.parameters, found.tied, tokens)


def difference(one: Logprobs, other: Logprobs) -> Difference:
    """Return the difference; nan, which passes no test, if either has nan or the lengths differ."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return Difference(float("nan"), float("nan"))
    gaps = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    if any(gap != gap for gap in gaps):
        return Difference(float("nan"), float("nan"))
    return Difference(sum(gaps) / len(gaps), max(gaps))


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if names[1:] else ''} such as {names[0]}"


def _short(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:80] + " …"
