"""Saves, lists, verifies and deletes the checkpoints of a run, in its directory or on another disk. Does not import torch.

A checkpoint is written into a hidden folder beside its place, flushed, sealed by COMMIT.json, and renamed; so `step_000010` is
complete or absent, whenever the process dies. Hidden folders that a killed process left behind:

    .tmp-step_000010    a save that did not finish
    .old-step_000010    the checkpoint that a new save of the same step was just replacing
    .trash-step_000010  a checkpoint that was just being deleted

Writing (save, clean, prune) is for the one process that holds the run's lock; any process may read.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from lockstep.checkpoint.manifest import commit, read_manifest, verify
from lockstep.config.schema import Json
from lockstep.errors import CheckpointError, CorruptCheckpointError
from lockstep.models.cache import sync_to_disk
from lockstep.track.places import checkpoints_of

log = logging.getLogger(__name__)

STATE = "state.json"
LARGEST_STATE = 64 << 20
RESTORE = "restore the checkpoint from a copy, or choose another"
SPARE = 16 << 20
"""Free bytes that a save leaves on the disk, beyond its own need."""
HIDDEN = (".tmp-", ".old-", ".trash-")
PLACE = re.compile(r"(\.tmp-|\.old-|\.trash-|)step_(\d{6,})$")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One folder of checkpoints/. Listing looks at names and sizes; only opening hashes."""

    step: int
    path: Path
    complete: bool
    problem: str = ""
    """Reason why it is not complete."""
    bytes: int = 0
    meta: Mapping[str, Json] = field(default_factory=dict)
    """The `meta` given to `save`."""
    notes: tuple[str, ...] = ()
    """Checkpoints that `open_checkpoint` passed over, and why. Show it to the user."""


def step_name(step: int) -> str:
    """Return the folder's name of a step. Example: "step_000010"."""
    return f"step_{step:06d}"


# --- write ----------------------------------------------------------------------------------------------------------
def save(
    run_dir: Path,
    step: int,
    writer: Callable[[Path], None],
    meta: Mapping[str, Json],
    *,
    bytes_needed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Write one checkpoint: `writer` puts its files into the folder it is given, `meta` becomes state.json.

    Returns the checkpoint's folder. `bytes_needed` is the size of the writer's files, checked against the free space first. An
    intact checkpoint of the same step is replaced only with `overwrite`, a damaged one always. Raises CheckpointError; whatever
    happens, the other checkpoints stay as they were and nothing half-written is left.
    """
    folder = checkpoints_of(run_dir)
    target, temporary = folder / step_name(step), folder / f".tmp-{step_name(step)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(run_dir)
        if target.exists() and not overwrite and _intact(target):
            raise CheckpointError(
                f"step {step} is already saved", where=str(target), fix="save each step once, or pass overwrite=True"
            )
        check_space(folder, bytes_needed)
        temporary.mkdir()
        writer(temporary)
        (temporary / STATE).write_text(_state(step, meta), encoding="utf-8")
        commit(temporary, step)
        _publish(temporary, target)
    except OSError as error:
        raise CheckpointError(
            f"step {step} could not be saved: {error}",
            where=str(target),
            fix="free space, make the folder writable or move the file that is in its place, then resume; earlier checkpoints "
            "are as they were",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # the error itself is told; the next save cleans what is left
    return target


def check_space(folder: Path, bytes_needed: int) -> None:
    """Raise CheckpointError if `bytes_needed` more would not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if bytes_needed + SPARE > free:
        raise CheckpointError(
            f"a checkpoint needs {_gib(bytes_needed + SPARE)} of disk, but only {_gib(free)} are free",
            where=str(folder),
            fix="free space, lower save.keep_last, or put runs_dir or paths.checkpoints on a larger disk",
        )


def clean(run_dir: Path) -> tuple[str, ...]:
    """Remove the remains of killed saves and deletions, and finish an interrupted replacement. Returns the actions."""
    done = []
    for path in sorted((checkpoints_of(run_dir)).glob(".*-step_*")):
        kind, step = _place(path.name)
        target = path.with_name(step_name(step))
        if kind == ".old-" and not target.exists():
            path.rename(target)
            sync_to_disk(target.parent)
            done.append(f"{path.name}: put back as {target.name}")
        elif kind in HIDDEN:
            shutil.rmtree(path)
            done.append(f"{path.name}: removed")
    return tuple(done)


def set_aside(run_dir: Path, after: int) -> list[str]:
    """Rename the checkpoints of steps after `after`, which a run that continues from there will repeat: damaged_step_N.

    Otherwise they would count as the newest, and the new ones would be deleted in their favour. Returns their new names.
    """
    names = []
    for info in list_checkpoints(run_dir):
        if info.step > after and _place(info.path.name)[0] == "":
            name = f"damaged_{info.path.name}"
            while info.path.with_name(name).exists():
                name += "_again"
            info.path.rename(info.path.with_name(name))
            names.append(name)
    sync_to_disk(checkpoints_of(run_dir))
    return names


def prune(run_dir: Path, keep_last: int, keep_best: int | None = None) -> list[int]:
    """Delete complete checkpoints except the newest `keep_last` and the one of step `keep_best`. Returns the deleted steps.

    Raises CheckpointError if `keep_last` is less than 1 or `keep_best` is not a checkpoint.
    """
    if keep_last < 1:
        raise CheckpointError(
            f"keep_last={keep_last} would delete every checkpoint", where=str(run_dir), fix="set keep_last to 1 or more"
        )
    clean(run_dir)
    complete = [info for info in list_checkpoints(run_dir) if info.complete]
    if keep_best is not None and keep_best not in {info.step for info in complete}:
        raise CheckpointError(
            f"the best checkpoint, step {keep_best}, does not exist",
            where=str(checkpoints_of(run_dir)),
            fix="resume the run: it warns and goes on without a best checkpoint",
        )
    doomed = [info for info in complete[:-keep_last] if info.step != keep_best]
    for info in doomed:
        trash = info.path.with_name(f".trash-{step_name(info.step)}")
        info.path.rename(trash)  # deleted as a whole, or not at all
        sync_to_disk(trash.parent)
        shutil.rmtree(trash)
    return [info.step for info in doomed]


def _publish(temporary: Path, target: Path) -> None:
    old = target.with_name(f".old-{target.name}")
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    sync_to_disk(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _intact(folder: Path) -> bool:
    try:
        verify(folder)
    except CorruptCheckpointError:
        return False
    return True


def _state(step: int, meta: Mapping[str, Json]) -> str:
    """Return the JSON. Raises CheckpointError for values that JSON would change."""
    try:
        text = json.dumps({"step": step, "meta": dict(meta)}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's meta cannot be written as JSON: {error}",
            where=STATE,
            fix="use text, numbers, lists and objects only",
        ) from error
    if json.loads(text)["meta"] != meta:
        raise CheckpointError(
            "a value of the checkpoint's meta changes when it is written as JSON",
            where=STATE,
            fix="use text as keys, and lists instead of tuples",
        )
    return text


# --- read -----------------------------------------------------------------------------------------------------------
def list_checkpoints(run_dir: Path) -> list[CheckpointInfo]:
    """Return all checkpoints by step, also incomplete ones and remains of killed saves, with their `problem`."""
    infos = [_inspect(path) for path in (checkpoints_of(run_dir)).glob("*") if PLACE.match(path.name)]
    return sorted(infos, key=lambda info: (info.step, info.complete))


def open_checkpoint(run_dir: Path, step: int | None = None, allow_fallback: bool = False) -> CheckpointInfo:
    """Verify every byte of a checkpoint, the newest if no `step` is given, and return it.

    A save that never finished is passed over. A damaged checkpoint raises CorruptCheckpointError naming the file; with
    `allow_fallback` the newest intact one before it is returned instead. `notes` say what was passed over.
    Raises CheckpointError if there is no such checkpoint.
    """
    infos = list_checkpoints(run_dir)
    places = [info for info in infos if info.complete or _place(info.path.name)[0] == ""]
    steps = sorted({info.step for info in places}, reverse=True)
    if step is not None and step not in steps:
        there = f"the saved steps are {', '.join(map(str, reversed(steps)))}" if steps else "none is saved"
        fix = "choose one of these steps" if steps else "start the run from the beginning"
        raise CheckpointError(f"no checkpoint of step {step}; {there}", where=str(checkpoints_of(run_dir)), fix=fix)
    if not steps:
        unfinished = "".join(f"; {_passed_over(info)}" for info in infos)
        raise CheckpointError(
            f"the run has no checkpoint{unfinished}",
            where=str(checkpoints_of(run_dir)),
            fix="start the run from the beginning",
        )
    wanted = steps[0] if step is None else step
    notes = [_passed_over(info) for info in infos if info not in places and info.step >= wanted]
    failures: list[CorruptCheckpointError] = []
    for info in sorted((info for info in places if info.step <= wanted), key=lambda info: info.step, reverse=True):
        try:
            found = verify_checkpoint(info.path)
            if found.step != info.step:
                raise CorruptCheckpointError(
                    f"the folder was renamed: it holds the checkpoint of step {found.step}",
                    where=str(info.path),
                    fix="give the folder its old name",
                )
        except CorruptCheckpointError as error:
            failures.append(error)
            notes.append(f"step {info.step} is damaged: {error.what}")
            continue
        if failures and not allow_fallback:
            raise _with_fix(failures[0], f"resume from step {info.step}, which is intact, with --allow-fallback")
        for note in notes:
            log.warning("%s; using step %d", note, info.step)
        return replace(found, notes=tuple(notes))
    raise _with_fix(failures[0], "no earlier checkpoint is intact: start the run again")


def verify_checkpoint(folder: Path) -> CheckpointInfo:
    """Verify every byte of the checkpoint in `folder`, wherever that is. Raises CorruptCheckpointError naming the file."""
    manifest = verify(folder)
    step, meta = _read_state(folder)
    if step != manifest.step:
        raise CorruptCheckpointError(
            f"{STATE} is of step {step}, but the checkpoint is of step {manifest.step}",
            where=str(folder),
            fix=RESTORE,
        )
    return CheckpointInfo(step, folder, complete=True, bytes=manifest.bytes, meta=meta)


def _inspect(path: Path) -> CheckpointInfo:
    kind, step = _place(path.name)
    if kind in (".tmp-", ".trash-"):
        problem = "its save did not finish" if kind == ".tmp-" else "its deletion did not finish"
        return CheckpointInfo(step, path, complete=False, problem=problem)
    if kind == ".old-" and path.with_name(step_name(step)).exists():
        return CheckpointInfo(step, path, complete=False, problem="it was replaced by a newer save")
    try:
        manifest = read_manifest(path)
        for name, entry in manifest.files.items():
            if not (path / name).is_file() or (path / name).stat().st_size != entry.bytes:
                raise CorruptCheckpointError(f"{name}: missing or of another size", where=str(path))
        saved, meta = _read_state(path)
    except (CorruptCheckpointError, OSError) as error:
        problem = (
            error.what if isinstance(error, CorruptCheckpointError) else f"it cannot be read: {error.strerror or error}"
        )
        return CheckpointInfo(step, path, complete=False, problem=problem)
    if not saved == manifest.step == step:
        return CheckpointInfo(
            step, path, complete=False, problem=f"it is the checkpoint of step {manifest.step}, renamed"
        )
    return CheckpointInfo(step, path, complete=True, bytes=manifest.bytes, meta=meta)


class _Facts(dict[str, Json]):
    """A JSON object of a checkpoint's state, in which a missing entry is a damaged checkpoint and not a KeyError."""

    # A copy (`dataclasses.asdict` makes one) is built from the entries alone.
    def __init__(self, facts: Mapping[str, Json] | Iterable[tuple[str, Json]] = (), folder: Path = Path(STATE)) -> None:
        super().__init__(facts)
        self._folder = folder

    def __missing__(self, key: str) -> NoReturn:
        raise CorruptCheckpointError(f"{STATE} has no entry {key!r}", where=str(self._folder), fix=RESTORE)


class _Meta(BaseModel):
    """The types of those entries of a run's checkpoint that are read again."""

    counters: dict[str, int] = {}
    critic: dict[str, int] = {}
    carried: dict[str, Any] = {}
    computes: dict[str, Any] = {}
    fingerprint: str = ""
    recipe: str = ""
    numerics: str = ""
    model: str = ""
    adapter: str = ""
    rows: dict[str, int | str] | None = None
    best: tuple[float | str, int] | None = None


def _read_state(folder: Path) -> tuple[int, Mapping[str, Json]]:
    path = folder / STATE
    try:
        if path.stat().st_size > LARGEST_STATE:
            raise ValueError(f"{path.stat().st_size} bytes")
        data = json.loads(path.read_bytes(), object_hook=lambda facts: _Facts(facts, folder))
        if not isinstance(data, dict) or data.keys() != {"step", "meta"} or not isinstance(data["meta"], dict):
            raise ValueError("its fields are not step and meta")
        _Meta.model_validate(data["meta"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CorruptCheckpointError(f"{STATE}: {reason}", where=str(folder), fix=RESTORE) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{STATE}: cannot be read ({error})", where=str(folder), fix=RESTORE) from error
    return data["step"], data["meta"]


def _place(name: str) -> tuple[str, int]:
    """Return (".tmp-", 10) for ".tmp-step_000010"; ("?", -1) for an unknown name."""
    match = PLACE.match(name)
    return (match[1], int(match[2])) if match else ("?", -1)


def _passed_over(info: CheckpointInfo) -> str:
    return f"{info.path.name} was passed over: {info.problem}"


def _with_fix(error: CorruptCheckpointError, fix: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(error.what, where=error.where, fix=fix)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
