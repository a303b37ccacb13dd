"""Scores on disk, and which of them may be compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path

from lockstep.errors import EvaluationError
from lockstep.evaluate.codec import CodecError, from_json, to_json
from lockstep.track.files import write_atomic
from lockstep.types import Conditions, Score

FORMAT = "lockstep.score"
VERSION = 1


def score_path(run_dir: Path, step: int, mode: str) -> Path:
    """Where a run keeps the score of a step and a mode's name. Example: scores/step_000020_greedy.json"""
    if step < 0 or not re.fullmatch(r"[a-z0-9_.@-]+", mode):
        raise EvaluationError(f"no file name for step {step} and mode {mode!r}", fix="use the mode's name")
    return run_dir / "scores" / f"step_{step:06d}_{mode}.json"


def write_score(path: Path, score: Score) -> None:
    """Write a record that `read_score` gives back equal, with a checksum; the file appears whole or not at all.

    Raises EvaluationError for numbers that JSON cannot hold (nan, infinity).
    """
    payload = to_json(score)
    try:
        body = {"format": FORMAT, "version": VERSION, "sha256": _digest(payload), "score": payload}
        text = json.dumps(body, indent=1, allow_nan=False)
    except ValueError as error:
        raise EvaluationError(
            f"a score holds a number that is not finite: {error}", where=str(path), fix="report how it was measured"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text + "\n")


def read_score(path: Path) -> Score:
    """The score in a file that `write_score` wrote.

    Raises EvaluationError, naming the file, if it is missing, no score record, of another version, or changed since.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise EvaluationError(f"cannot be read: {error.strerror}", where=str(path), fix="check the path") from error
    except (ValueError, RecursionError) as error:
        raise _foreign(path, f"not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _foreign(path, f"no record of format {FORMAT}")
    if body.get("version") != VERSION:
        raise EvaluationError(
            f"score record of version {body.get('version')!r}; this Lockstep reads version {VERSION}",
            where=str(path),
            fix="use the Lockstep that wrote it, or evaluate again",
        )
    if set(body) != {"format", "version", "sha256", "score"} or body["sha256"] != _digest(body["score"]):
        raise EvaluationError(
            "its checksum is not that of its content: the file was changed or damaged after it was written",
            where=str(path),
            fix="evaluate again; a score is not edited by hand",
        )
    try:
        return from_json(Score, body["score"])
    except CodecError as error:
        raise _foreign(path, str(error)) from error


def stored_score(path: Path, conditions: Conditions) -> Score | None:
    """The score at `path` if it was measured under exactly these conditions, weights included: no need to repeat it.

    None if there is no file or it is of other conditions; a damaged file raises.
    """
    if not path.exists():
        return None
    score = read_score(path)
    return score if score.conditions == conditions else None


def comparable(a: Conditions, b: Conditions) -> list[str]:
    """Names of the conditions in which two scores differ, weights apart: those are what is being compared."""
    names = [f.name for f in dataclasses.fields(Conditions) if f.name != "weights"]
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def _digest(payload: object) -> str:
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _foreign(path: Path, why: str) -> EvaluationError:
    return EvaluationError(f"is no score record: {why}", where=str(path), fix="give a file from a run's scores folder")
