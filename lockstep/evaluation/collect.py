"""Finds the score files that a user names by a file, a run or a folder. Reads only the part that a comparison needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import EvaluationError
from lockstep.evaluation.brief import Brief
from lockstep.evaluation.compare import differences
from lockstep.evaluation.records import read_brief

STEP = re.compile(r"(.+)@(\d+)")
RECORD = re.compile(r"step_(\d+)_.+\.json|.+_step_(\d+)_.+\.json")


@dataclass(frozen=True, slots=True)
class Record:
    """A score file and the part of it that was read."""

    path: Path
    brief: Brief

    @property
    def key(self) -> tuple[str, str]:
        """Key of the comparison: scores of one key have the same items and the same mode."""
        return self.brief.score.conditions.task, self.brief.score.conditions.mode

    @property
    def label(self) -> str:
        """Name for people. Example: "runs/mine at step 40"; the file's name for a record that does not say."""
        return self.brief.score.source or str(self.path)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two records to compare."""

    before: Record
    after: Record


def records_of(name: str) -> list[Record]:
    """Return every score that NAME or NAME@STEP means: a file, a run's own scores, or those of a folder.

    Raises EvaluationError, naming the file, for one that is missing, damaged or no score record.
    """
    path, step = _split(name)
    if path.is_file():
        files = [path]
    else:
        folder = path / "scores" if (path / "scores").is_dir() else path
        files = sorted(folder.glob("*.json"))
    files = [file for file in files if step is None or _step_of(file) in (None, step)]
    found = [Record(file, read_brief(file)) for file in files]
    found = [record for record in found if step is None or record.brief.score.step == step]
    if not found:
        at = "" if step is None else f" of step {step}"
        raise EvaluationError(
            f"there are no scores{at}" if path.exists() else "there is no such file or folder",
            where=str(path),
            fix="give a score file, a run that was evaluated, or a folder of score files",
        )
    return found


def newest(records: Sequence[Record]) -> list[Record]:
    """Return the record of the last step for each task and mode. Raises EvaluationError if two differ in conditions."""
    last: dict[tuple[str, str], int] = {}
    for record in records:
        last[record.key] = max(record.brief.score.step, last.get(record.key, 0))
    return _one_each([record for record in records if record.brief.score.step == last[record.key]])


def base_and_last(records: Sequence[Record]) -> list[Pair]:
    """Return a run's base against its last score, in every mode. Raises EvaluationError unless there is one of each."""
    last = {record.key: record for record in newest(records)}
    base = _one_each([record for record in records if record.brief.score.step == 0])
    pairs = [Pair(record, last[record.key]) for record in base if last[record.key] is not record]
    if not pairs:
        raise EvaluationError(
            "there is nothing to compare: no task and mode has both a base score (step 0) and a later score",
            fix="evaluate the run's base and a later step, or give two scores, runs or folders",
        )
    return pairs


def _one_each(records: Sequence[Record]) -> list[Record]:
    """Return one record per key; if several have the same conditions, which makes them equal, the first."""
    found: dict[tuple[str, str], Record] = {}
    for record in records:
        other = found.setdefault(record.key, record)
        if other.brief.score.conditions != record.brief.score.conditions:
            raise _two(other, record)
    return list(found.values())


def pair(before: Sequence[Record], after: Sequence[Record], *, by_step: bool = False) -> list[Pair]:
    """Pair two sides by task and mode, with `by_step` by step too; one score on each side is a pair whatever it is of.

    Raises EvaluationError if nothing pairs, or if a side has two scores of one key; it names what differs.
    """
    if len(before) == 1 and len(after) == 1:
        return [Pair(before[0], after[0])]
    left, right = _by_key(before, by_step=by_step), _by_key(after, by_step=by_step)
    common = [key for key in left if key in right]
    if not common:
        a, b = before[0].brief.score.conditions, after[0].brief.score.conditions
        raise EvaluationError(
            f"the two sides have no task and mode in common; their first scores differ in {differences(a, b)}",
            where=f"{before[0].path} and {after[0].path}",
            fix="give two score files to compare them anyway",
        )
    return [Pair(left[key], right[key]) for key in common]


def unpaired(before: Sequence[Record], after: Sequence[Record], pairs: Sequence[Pair]) -> list[Record]:
    """Return the records that are in no pair."""
    used = {id(record) for one in pairs for record in (one.before, one.after)}
    return [record for record in (*before, *after) if id(record) not in used]


def _by_key(records: Sequence[Record], *, by_step: bool) -> dict[tuple[object, ...], Record]:
    found: dict[tuple[object, ...], Record] = {}
    for record in records:
        key = (*record.key, *([record.brief.score.step] if by_step else []))
        if key in found:
            raise _two(found[key], record)
        found[key] = record
    return found


def _two(one: Record, other: Record) -> EvaluationError:
    step = f" at step {one.brief.score.step}" if one.brief.score.step == other.brief.score.step else ""
    return EvaluationError(
        f"there are two scores of mode {one.key[1]} of {one.key[0]}{step}",
        where=f"{one.path} and {other.path}",
        fix="give only the file to compare" if step else "give only the file to compare, or one step: FOLDER@STEP",
    )


def _split(name: str) -> tuple[Path, int | None]:
    match = STEP.fullmatch(name)
    return (Path(match[1]), int(match[2])) if match and not Path(name).exists() else (Path(name), None)


def _step_of(path: Path) -> int | None:
    match = RECORD.fullmatch(path.name)
    return int(match[1] or match[2]) if match else None
