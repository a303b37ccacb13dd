"""Lists all runs of a folder: state, steps, last reward, best score, tags, and what may be deleted of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.text import value_at
from lockstep.errors import CheckpointError, LockstepError, RunLockedError
from lockstep.track.catalogue import accuracies
from lockstep.track.lock import Lock
from lockstep.track.places import drop_empty, twin_of
from lockstep.track.rundir import LOCK, RunDirectory, is_run, never_began
from lockstep.track.state import state_of
from lockstep.track.writer import StepRecord, read_metrics


@dataclass(frozen=True, slots=True)
class Listed:
    """One run in a list."""

    path: Path
    state: str
    """A name of RunState, "never began", or "unreadable"."""
    reason: str
    step: int
    steps: int
    reward: float | None
    """Mean reward of the last step that has one."""
    best: tuple[str, float, int] | None
    """The highest accuracy of the run's first evaluation: its name, the accuracy and the step."""
    began: str
    """Time of the start, UTC."""
    tags: tuple[str, ...]
    archived: bool
    recipe: Mapping[str, Any]
    """The resolved settings as data."""


def list_runs(folder: Path) -> list[Listed]:
    """Return the runs directly below `folder`, newest first; one that cannot be read says why."""
    found = [_listed(path) for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    return sorted(found, key=lambda one: one.began, reverse=True)


def _listed(path: Path) -> Listed:
    try:
        run = RunDirectory.open(path)
        manifest, rows, state = run.manifest(), read_metrics(run), state_of(run)
        recipe, never = run.settings(), never_began(path)
    except LockstepError as error:
        return Listed(path, "unreadable", error.what, 0, 0, None, None, "", (), False, {})
    steps = recipe.get("steps")
    own = value_at(recipe, "track.tags")
    return Listed(
        path=path,
        state="never began" if state.name != "running" and never else state.name,
        reason=state.reason,
        step=rows[-1].step if rows else 0,
        steps=steps if isinstance(steps, int) else 0,
        reward=next((row.metrics["reward/mean"] for row in reversed(rows) if "reward/mean" in row.metrics), None),
        best=_best(rows),
        began=str(manifest.get("time", "")),
        tags=tuple(dict.fromkeys([*map(str, own if isinstance(own, list) else ()), *manifest.get("tags", [])])),
        archived=bool(manifest.get("archived")),
        recipe=recipe,
    )


def _best(rows: list[StepRecord]) -> tuple[str, float, int] | None:
    scored = [(mode, value, row.step) for row in rows for mode, value in accuracies(row.metrics)]
    return max((one for one in scored if one[0] == scored[0][0]), key=lambda one: (one[1], -one[2]), default=None)


def annotate(path: Path, **facts: object) -> None:
    """Set entries of a run's manifest. Raises RunLockedError while another process writes there."""
    RunDirectory.open(path)
    lock = Lock(path / LOCK)
    run = RunDirectory(path, lock, attempt=1)
    with run:
        run.add_to_manifest(facts)


@dataclass(frozen=True, slots=True)
class Removable:
    """A folder that is of no more use."""

    path: Path
    run: Path
    why: str
    bytes: int


def removable(runs: Iterable[Listed]) -> Iterator[Removable]:
    """Yield starts that failed, and the checkpoints of archived runs except their newest. Nothing of a run that goes on."""
    for run in runs:
        if run.state == "never began":
            yield Removable(run.path, run.path, "stopped before its first step", _size(run.path))
        if run.archived and run.state != "running":
            for checkpoint in _own(run.path)[:-1]:
                yield Removable(checkpoint, run.path, "checkpoint of an archived run", _size(checkpoint))


def _own(run: Path) -> list[Path]:
    """Return the whole checkpoints that are a run's alone, by step; none if they are on a disk that is not there, or its copy has
    them too.
    """
    try:
        return [one.path for one in list_checkpoints(run) if one.complete] if twin_of(run) is None else []
    except CheckpointError:
        return []


def remove(one: Removable) -> bool:
    """Delete a folder, unless its run is being written; returns whether it was deleted."""
    try:
        lock = Lock(one.run / LOCK)
    except RunLockedError:
        return False
    try:
        if one.run == one.path:
            drop_empty(one.run)
        rmtree(one.path)
    finally:
        if one.run != one.path:
            lock.release()
    return True


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
