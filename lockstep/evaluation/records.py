"""Writes and reads score files, and checks that two scores may be compared.

A score file is one JSON document of four lines, so that a thousand can be compared without reading every reply's text:

    {"format": "lockstep.score", "version": 2, "sha256": "…of the three lines below…",
    "score": {conditions, numbers, proof},
    "brief": {marks and digests, item by item},
    "results": [every reply]}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lockstep.codec import CodecError, from_json, strict_json, to_json
from lockstep.errors import DEFECT, EvaluationError
from lockstep.evaluation.brief import Brief, Marks, brief_of, default_estimate, marks_of
from lockstep.evaluation.estimates import estimate
from lockstep.track.files import write_atomic
from lockstep.types import Conditions, Score

FORMAT = "lockstep.score"
VERSION = 2
"""Version of the format. Version 1 lacks reasoning effort, suffix, estimates and methods; they are read as None."""
_HEAD = re.compile(rb'\{"format": "lockstep\.score", "version": 2, "sha256": "([0-9a-f]{64})",\n')
_ADDED: dict[str, Any] = {"workers": 1}
"""Fields that older records of version 2 lack."""
_PARTS = (b'"score": ', b'"brief": ', b'"results": ')


def score_path(run_dir: Path, step: int, mode: str) -> Path:
    """Return the path of a run's score at a step and a mode's name. Example: scores/step_000020_greedy.json"""
    if step < 0 or not re.fullmatch(r"[a-z0-9_.@-]+", mode):
        raise EvaluationError(
            f"a score of step {step} and mode {mode!r} has no file name",
            fix="give a step of 0 or more, and the name of a mode of the recipe",
        )
    return run_dir / "scores" / f"step_{step:06d}_{mode}.json"


def write_score(path: Path, score: Score) -> None:
    """Write a record that `read_score` gives back equal, with a checksum; the file appears whole or not at all.

    Raises EvaluationError for numbers that JSON cannot hold (nan, infinity).
    """
    fields = to_json(score)
    results = fields.pop("results")
    try:
        parts = [json.dumps(part, allow_nan=False) for part in (fields, to_json(marks_of(score)), results)]
    except ValueError as error:
        raise EvaluationError(
            f"the score has a number that is not finite: {error}", where=str(path), fix=DEFECT
        ) from error
    body = '"score": {},\n"brief": {},\n"results": {}}}\n'.format(*parts)
    digest = hashlib.sha256(body.encode()).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, f'{{"format": "{FORMAT}", "version": {VERSION}, "sha256": "{digest}",\n{body}')


def read_score(path: Path) -> Score:
    """Return the score in a file that `write_score` wrote.

    Raises EvaluationError, naming the file, if it is missing, no score record, of another version, or changed since.
    """
    raw = _bytes(path)
    if (parts := _parts(raw, path)) is None:
        return _older(raw, path)
    try:
        return from_json(Score, _ADDED | json.loads(parts[0]) | {"results": json.loads(parts[2])})
    except (ValueError, RecursionError) as error:
        raise _foreign(path, str(error)) from error


def read_brief(path: Path) -> Brief:
    """Return the part of a score's file that a comparison needs: the replies' texts are covered by the checksum and not parsed.

    Raises EvaluationError as `read_score` does.
    """
    raw = _bytes(path)
    if (parts := _parts(raw, path)) is None:
        return brief_of(_older(raw, path))
    try:
        score = from_json(Score, _ADDED | json.loads(parts[0]) | {"results": []})
        return Brief(score, from_json(Marks, json.loads(parts[1])))
    except (ValueError, RecursionError) as error:
        raise _foreign(path, str(error)) from error


def stored_score(path: Path, conditions: Conditions, numbers: Collection[str] = ()) -> Score | None:
    """Return the score at `path` if it was measured under exactly these conditions, weights included: no need to repeat it.

    None if there is no file, its conditions differ, or it lacks one of these estimates; a damaged file raises.
    """
    if not path.exists():
        return None
    score = read_score(path)
    same = score.conditions.weights == conditions.weights and not comparable(score.conditions, conditions)
    return score if same and {one.name for one in score.estimates}.issuperset(numbers) else None


def comparable(a: Conditions, b: Conditions) -> list[str]:
    """Return names of the conditions in which two scores differ, except the weights, which are being compared.

    Fields that a record does not state (None) are ignored: the template hash covers both such fields.
    """
    names = [f.name for f in dataclasses.fields(Conditions) if f.name != "weights"]
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in names]
    return [name for name, one, other in pairs if one != other and one is not None and other is not None]


# --- reading --------------------------------------------------------------------------------------------------------
def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EvaluationError(
            f"the score file cannot be read: {error.strerror}",
            where=str(path),
            fix="give the path of a score file that you may read",
        ) from error


def _parts(raw: bytes, path: Path) -> list[bytes] | None:
    """Return score, brief and results of a record of version 2; None for anything else. Raises EvaluationError if the checksum is
    wrong.
    """
    head = _HEAD.match(raw)
    if head is None:
        return None
    body = raw[head.end() :]
    lines = body.split(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != head[1] or len(lines) != 4:
        raise _damaged(path)
    if not all(line.startswith(name) for line, name in zip(lines, _PARTS, strict=False)):
        raise _foreign(path, "its lines are not score, brief and results")
    return [line[len(name) : -1] for line, name in zip(lines, _PARTS, strict=False)]


def _older(raw: bytes, path: Path) -> Score:
    """Return a record of version 1. Raises EvaluationError if it is not one."""
    try:
        body = strict_json(raw)
    except ValueError as error:
        raise _foreign(path, f"not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _foreign(path, f"not a record of format {FORMAT}")
    if body.get("version") == VERSION:  # its head is not as it was written
        raise _damaged(path)
    if body.get("version") != 1:
        raise EvaluationError(
            f"this score record has version {body.get('version')!r}, but this Lockstep reads versions 1 and {VERSION}",
            where=str(path),
            fix="use the version of Lockstep that wrote the record, or evaluate again",
        )
    text = json.dumps(body.get("score"), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if set(body) != {"format", "version", "sha256", "score"} or body["sha256"] != digest:
        raise _damaged(path)
    try:
        return _upgraded(body["score"])
    except CodecError as error:
        raise _foreign(path, str(error)) from error


def _upgraded(payload: Any) -> Score:
    """Return a score of version 1 in the present fields: missing ones are None or empty, its estimate follows from its marks."""
    if not isinstance(payload, dict):
        raise CodecError("expected fields", ".Score")
    conditions, results = payload.get("conditions"), payload.get("results")
    silent = {"reasoning_effort": None, "prompt_suffix": None}
    added = {"method": "", "boxed": None, "error": None}
    body = payload | {"estimates": [], "source": ""} | _ADDED
    if isinstance(conditions, dict):
        body["conditions"] = silent | conditions
    if isinstance(results, list):
        body["results"] = [added | result if isinstance(result, dict) else result for result in results]
    score = from_json(Score, body)
    made = estimate(score.results, default_estimate(score.samples), score.samples)
    one = dataclasses.replace(made, value=score.accuracy, low=score.low, high=score.high)
    return dataclasses.replace(score, estimates=(one,))


def _damaged(path: Path) -> EvaluationError:
    return EvaluationError(
        "the record's checksum does not match its content: the file was changed or damaged after it was written",
        where=str(path),
        fix="delete the file and evaluate again; a score is not edited by hand",
    )


def _foreign(path: Path, why: str) -> EvaluationError:
    return EvaluationError(
        f"this is not a score record: {why}",
        where=str(path),
        fix="give a file that Lockstep wrote into a run's folder `scores`; if this one is there, move it out",
    )
