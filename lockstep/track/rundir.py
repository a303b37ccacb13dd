"""A run directory: the inputs, records and results of one run. Layout:

    runs/<name>/  recipe.yaml (resolved)  manifest.json (code, packages, machine, attempts, …)  run.lock
      metrics.jsonl  events.jsonl  spikes.jsonl  stall.txt  log.txt  report.html
      rollouts/step_000012.parquet  scores/*.json  checkpoints/step_000010/ (or checkpoints.json, which says where they are)
      code/ (copies of the user's files)  trackers/NAME.json  wandb/  tensorboard/

One process writes (create, resume); any number read (open). `run.lock` names the writer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from lockstep.config.text import parse
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.track.facts import manifest_facts
from lockstep.track.files import Closing, read_plain, remove_temporary, require_plain, write_atomic
from lockstep.track.jsonl import dumps, read_json
from lockstep.track.lock import Holder, Lock
from lockstep.track.places import (
    FOLDER,
    MANIFEST,
    RECORD,
    checkpoints_of,
    claim,
    drop_empty,
    is_empty,
    is_run,
    put_apart,
    require_root,
)

__all__ = ["RunDirectory", "is_run", "manifest_facts"]

FORMAT = 1
"""Version of the layout; a directory of a newer one is refused."""
LOCK = "run.lock"
FOLDERS = ("rollouts", "scores", FOLDER)
CODE = "code"
"""Copies of the user's files, which a run that stopped before its first step leaves, too."""
WORKERS = "workers"
"""Output and process ids of the workers of a run on several GPUs."""
FOREIGN = frozenset({"wandb", "tensorboard", "trackers"})
"""Folders of trackers; W&B keeps links in its own. A run that stopped before its first step leaves them, too."""
LEFT = (MANIFEST, RECORD, "recipe.yaml", "events.jsonl", "stall.txt", "log.txt", "report.html")
"""Files of a run that stopped before its first step."""
UNFINISHED = {LOCK, RECORD, "recipe.yaml"}
"""Files that a killed creation may have left, besides empty folders; manifest.json is written last."""


class RunDirectory(Closing):
    """Paths and the manifest of one run. Use `create`, `resume` (both hold the lock) or `open` (reads only)."""

    def __init__(self, path: Path, lock: Lock | None, attempt: int) -> None:
        self.path = path
        self.recipe_path = path / "recipe.yaml"
        self.manifest_path = path / MANIFEST
        self.metrics_path = path / "metrics.jsonl"
        self.events_path = path / "events.jsonl"
        self.log_path = path / "log.txt"
        self.spikes_path = path / "spikes.jsonl"
        self.rollouts_path = path / "rollouts"
        self.scores_path = path / "scores"
        self.report_path = path / "report.html"
        self._lock = lock
        self.attempt = attempt
        """1 for the process that created the run, one more for each that resumed it."""
        self.replaced = False
        """A start that had failed before its first step was in this place."""

    @classmethod
    def create(
        cls, path: str | Path, recipe_yaml: str, manifest: Mapping[str, object], checkpoints: str | None = None
    ) -> RunDirectory:
        """Make the directory of a new run and lock it; `checkpoints`: the folder below which its checkpoints are kept.

        A run that stopped before its first step and kept nothing is replaced; `replaced` says so. Raises RunDirectoryError
        where a run, or anything else, is already; RunLockedError if one is being made there.
        """
        path = Path(path)
        refuse_taken(path, checkpoints)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot be created: {error.strerror}"
            raise RunDirectoryError(what, where=str(path), fix="choose another runs_dir") from error
        lock = Lock(path / LOCK)
        try:
            refuse_taken(path)  # again: another process may have finished creating it before this one got the lock
            replaced = is_run(path)
            drop_empty(path)
            for name in LEFT if replaced else ():
                (path / name).unlink(missing_ok=True)
            for name in (CODE, *FOREIGN) if replaced else ():
                rmtree(path / name, ignore_errors=True)
            for folder in FOLDERS if checkpoints is None else FOLDERS[:-1]:
                (path / folder).mkdir(exist_ok=True)
            if checkpoints is not None:
                put_apart(path, checkpoints)
            write_atomic(path / "recipe.yaml", recipe_yaml)
            run = cls(path, lock, attempt=1)
            run.replaced = replaced
            run._write_manifest({"format": FORMAT, **manifest, "attempts": [_attempt(1, manifest)]})
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run to read it.

        Raises RunDirectoryError if there is none that this version reads, or a link or a pipe is among its files.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        require_plain(path, skip=FOREIGN)
        return cls(path, None, attempt=len(manifest["attempts"]))

    @classmethod
    def resume(cls, path: str | Path, manifest: Mapping[str, object]) -> RunDirectory:
        """Lock an existing run to continue it. `manifest`, the facts of this process, becomes an entry of `attempts`.

        Removes what interrupted writes left. Raises as `open` and for a file in a folder's place, and RunLockedError if another
        process writes there.
        """
        path = Path(path)
        cls.open(path)
        for place in (path / name for name in (*FOLDERS, CODE, WORKERS)):
            if place.is_file():
                what, fix = "this is a file, but a folder of the run has this name", "move the file away, then resume"
                raise RunDirectoryError(what, where=str(place), fix=fix)
        lock = Lock(path / LOCK)
        try:
            claim(path)
            current = _read_manifest(path)
            run = cls(path, lock, attempt=len(current["attempts"]) + 1)
            for folder in (path, *(path / name for name in FOLDERS)):
                remove_temporary(folder)
            run._write_manifest({**current, "attempts": [*current["attempts"], _attempt(run.attempt, manifest)]})
        except BaseException:
            lock.release()
            raise
        return run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def checkpoints_path(self) -> Path:
        return checkpoints_of(self.path)

    # --- content ---
    def recipe_yaml(self) -> str:
        """Return the resolved recipe. Raises RunDirectoryError if it is gone."""
        try:
            return read_plain(self.recipe_path).decode()
        except OSError as error:
            raise RunDirectoryError(f"cannot be read: {error.strerror}", where=str(self.recipe_path)) from error
        except UnicodeDecodeError as error:
            raise RunDirectoryError(
                "the recipe is not UTF-8", where=str(self.recipe_path), fix="restore it from a copy"
            ) from error

    def settings(self) -> dict[str, Any]:
        """Return the recipe as data, whatever its version. Raises RunDirectoryError if it is gone, or none."""
        try:
            tree = parse(self.recipe_yaml(), "recipe.yaml").value
        except ConfigError as error:
            raise RunDirectoryError(f"cannot be read: {error.mistakes[0]}", where=str(self.recipe_path)) from error
        return tree if isinstance(tree, dict) else {"recipe": tree}

    def replace_recipe(self, recipe_yaml: str) -> None:
        """Put another resolved recipe in its place."""
        self.require_writable()
        write_atomic(self.recipe_path, recipe_yaml)

    def manifest(self) -> dict[str, Any]:
        return _read_manifest(self.path)

    def add_to_manifest(self, facts: Mapping[str, object]) -> None:
        """Set top-level entries (formula, plan, data hashes). Raises RunDirectoryError for a reader or a reserved key."""
        if mine := facts.keys() & {"format", "attempts"}:
            what = f"manifest keys {sorted(mine)} are written by the run directory itself"
            raise RunDirectoryError(what, where=str(self.manifest_path))
        self._write_manifest({**self.manifest(), **facts})

    # --- lock ---
    @property
    def writable(self) -> bool:
        return self._lock is not None and self._lock.held

    @property
    def taken_from(self) -> Holder | None:
        """The process that died while it held the lock that this one now holds."""
        return self._lock.taken_from if self._lock is not None else None

    def require_writable(self) -> None:
        """Raise RunDirectoryError unless this process holds the lock."""
        if not self.writable:
            fix = "use RunDirectory.create or RunDirectory.resume"
            raise RunDirectoryError("the run is open for reading only", where=str(self.path), fix=fix)

    def close(self) -> None:
        """Let go of the lock. Twice is once."""
        if self._lock is not None:
            self._lock.release()

    def _write_manifest(self, manifest: Mapping[str, object]) -> None:
        self.require_writable()
        write_atomic(self.manifest_path, dumps(manifest, indent=2) + "\n")


class _Code(BaseModel):
    commit: str | None = None
    changed_files: int | None = None
    why: str | None = None


class _Gpu(BaseModel):
    name: str
    memory_gib: float


class _Parent(BaseModel):
    run: str
    step: int
    fingerprint: str
    parent: _Parent | None = None


class _Manifest(BaseModel):
    """The types of those entries of manifest.json that are read again; it may have others."""

    format: int
    attempts: Annotated[list[dict[str, Any]], Field(min_length=1)]
    recipe: str | None = None
    cwd: str | None = None
    command: list[str] | None = None
    formula: str | None = None
    template_hash: str | None = None
    code: _Code | None = None
    cpu: dict[str, Any] | None = None
    gpu: list[_Gpu] | None = None
    packages: dict[str, Any] | None = None
    tags: list[str] = []
    parent: _Parent | None = None
    fetched_from: dict[str, str] | None = None


def ancestors(manifest: Mapping[str, Any]) -> list[str]:
    """Return the runs that a run started from, newest first, each in words."""
    found, parent = [], manifest.get("parent")
    while parent:
        found.append(f"{parent['run']} at step {parent['step']}, weights {parent['fingerprint']}")
        parent = parent.get("parent")
    return found


def _attempt(number: int, facts: Mapping[str, object]) -> dict[str, object]:
    """Return the facts that may differ between the processes of one run; the rest stands once at the top of the manifest."""
    kept = facts if number > 1 else {key: facts[key] for key in ("time", "host", "pid", "command") if key in facts}
    return {"attempt": number, **kept}


def never_began(path: Path) -> bool:
    """Return True if a run stopped before its first step and left its recipe and messages alone: no number, score, checkpoint."""
    if not is_run(path) or not is_empty(path):
        return False
    kept = [
        entry
        for entry in path.iterdir()
        if entry.name not in {*LEFT, CODE, *FOREIGN, "metrics.jsonl"} and not _is_unfinished(entry)
    ]
    metrics = path / "metrics.jsonl"
    return not kept and not (metrics.exists() and metrics.stat().st_size)


def refuse_taken(path: Path, checkpoints: str | None = None) -> None:
    """Raise RunDirectoryError if no new run can be made at `path`: a run with results, a file or foreign files are there, or
    the folder above cannot be written, or that for its checkpoints is not there."""
    if checkpoints is not None:
        require_root(checkpoints)
    if (path / MANIFEST).exists() and not never_began(path):
        fix = f"continue it with `lockstep train --resume {path}`, or give the new run another name: name=NAME"
        raise RunDirectoryError("a run already exists here", where=str(path), fix=fix)
    if path.exists() and not path.is_dir():
        raise RunDirectoryError("this is a file, not a folder", where=str(path), fix="choose another name or runs_dir")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise RunDirectoryError(f"{above} is a file, not a folder", where=str(path), fix="choose another runs_dir")
    if not path.exists() and not os.access(above, os.W_OK):
        raise RunDirectoryError(
            "cannot be created: no permission to write there", where=str(path), fix="choose another runs_dir"
        )
    inside = path.iterdir() if path.exists() and not is_run(path) else ()
    foreign = [entry.name for entry in inside if not _is_unfinished(entry)]
    if foreign:
        what = f"the folder holds files that do not belong to a run: {', '.join(sorted(foreign)[:5])}"
        raise RunDirectoryError(what, where=str(path), fix="choose another name or runs_dir")


def _is_unfinished(entry: Path) -> bool:
    if entry.name in FOLDERS and entry.is_dir() and not entry.is_symlink():
        return not any(entry.iterdir())
    return entry.name in UNFINISHED or (entry.name.startswith(".") and entry.name.endswith(".tmp"))


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        runs = (entry for entry in path.parent.glob("*/") if is_run(entry) and (entry / "recipe.yaml").is_file())
        near = sorted(entry.name for entry in runs)
        fix = f"choose from {path.parent}: {', '.join(near[:8])}" if near else "start one with `lockstep train RECIPE`"
        what = "this is a file, not a run directory" if path.is_file() else "no such run directory"
        raise RunDirectoryError(what, where=str(path), fix=fix)
    if not (path / MANIFEST).exists():
        fix = "if its process was killed while starting, start the run again with `lockstep train RECIPE`"
        raise RunDirectoryError("this is not a run directory: it has no manifest.json", where=str(path), fix=fix)
    manifest = read_json(path / MANIFEST)
    try:
        _Manifest.model_validate(manifest, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"this is not a manifest of Lockstep: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise RunDirectoryError(what, where=str(path / MANIFEST), fix="restore it from a copy") from error
    assert isinstance(manifest, dict)  # or it would not have been valid
    if manifest["format"] > FORMAT:
        what = f"a newer Lockstep wrote this run: its format is {manifest['format']}, this version reads up to {FORMAT}"
        raise RunDirectoryError(what, where=str(path), fix="update Lockstep")
    return manifest
