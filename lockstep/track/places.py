"""The folder of a run's checkpoints: in its directory, or on another disk (paths.checkpoints).

On another disk its name is that of the run and a random id. The run and the folder hold the same record: it leads from a
checkpoint to its run, and no folder of another run is mistaken for this one's.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.track.files import storing, write_atomic
from lockstep.track.jsonl import dumps, read_json

FOLDER, MANIFEST = "checkpoints", "manifest.json"
RECORD, OWNER = "checkpoints.json", "run.json"
"""Names of the record, in the run's directory and in the folder of its checkpoints."""


class _Place(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    folder: str
    id: str


def is_run(path: Path) -> bool:
    """Return True if a run was started there. `RunDirectory.open` says whether it can be read."""
    return (path / MANIFEST).is_file()


def checkpoints_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints. Raises CheckpointError if it is on another disk and not there, or another's."""
    if not (run / RECORD).exists():
        return run / FOLDER
    mine = _read(run / RECORD)
    folder = Path(mine.folder)
    if not (folder / OWNER).is_file():
        what = "the folder of the run's checkpoints is missing: it was moved or removed, or its disk is not mounted"
        fix = f"mount the disk or put the folder back; if it was moved, write its new path into {run / RECORD}"
        raise CheckpointError(what, where=str(folder), fix=fix)
    if _read(folder / OWNER).id != mine.id:
        fix = f"write the path of the run's own folder into {run / RECORD}"
        raise CheckpointError(f"the folder holds checkpoints of another run, not of {run}", where=str(folder), fix=fix)
    return folder


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint is kept for; None for one that lies elsewhere, or whose run was moved."""
    folder = checkpoint.resolve().parent
    if (folder / OWNER).is_file():
        found = _read(folder / OWNER)
        return Path(found.run) if _has(Path(found.run), found.id) else None
    if folder.name != FOLDER or not is_run(folder.parent):
        return None
    return checkpoint.parent.parent if checkpoint.parent.name == FOLDER else folder.parent


def twin_of(run: Path) -> Path | None:
    """Return another run directory that has the same folder of checkpoints: one of the two is a copy."""
    folder = checkpoints_of(run)
    if folder == run / FOLDER:
        return None
    owner = _read(folder / OWNER)
    other = Path(owner.run)
    return other if _has(other, owner.id) and not other.samefile(run) else None


def require_root(root: str) -> Path:
    """Return the folder that a setting names. Raises RunDirectoryError if it is not there: it is not made, because a disk that
    is not mounted would be replaced by a folder on another one."""
    path = Path(root).expanduser().absolute()
    if not path.is_dir():
        fix = f"mount its disk, or create the folder: mkdir -p {path}"
        raise RunDirectoryError("paths.checkpoints names a folder that does not exist", where=str(path), fix=fix)
    return path


def put_apart(run: Path, root: str) -> None:
    """Make the folder of a new run's checkpoints below `root`. Raises RunDirectoryError."""
    mine = secrets.token_hex(4)
    folder = require_root(root) / f"{run.resolve().name}-{mine}"
    with storing(folder):
        folder.mkdir()
    _write(_Place(run=str(run.resolve()), folder=str(folder), id=mine), run)


def drop_empty(run: Path) -> None:
    """Remove the folder on another disk of a run that saved nothing, and the record of it."""
    if (run / RECORD).exists() and is_empty(run):
        folder = checkpoints_of(run)
        (folder / OWNER).unlink()
        folder.rmdir()
    (run / RECORD).unlink(missing_ok=True)


def is_empty(run: Path) -> bool:
    """Return whether nothing is kept in a run's folder on another disk; False for one that cannot be found."""
    try:
        return not (run / RECORD).exists() or {path.name for path in checkpoints_of(run).iterdir()} == {OWNER}
    except CheckpointError:
        return False


def claim(run: Path) -> None:
    """Correct the records of a run or a folder that was moved. Raises RunDirectoryError for a copy of a run that is still there.

    For the process that holds the run's lock.
    """
    if not (run / RECORD).exists():
        return
    if (twin := twin_of(run)) is not None:
        fix = f"resume {twin}, or begin another run from its weights: warm_start={twin}"
        raise RunDirectoryError(
            f"this run has the same checkpoints as {twin}, so one of the two is a copy", where=str(run), fix=fix
        )
    folder = checkpoints_of(run)
    right = _Place(run=str(run.resolve()), folder=str(folder), id=_read(run / RECORD).id)
    if _read(folder / OWNER) != right:
        _write(right, run)


def _has(run: Path, place: str) -> bool:
    return is_run(run) and (run / RECORD).exists() and _read(run / RECORD).id == place


def _write(place: _Place, run: Path) -> None:
    for path in (Path(place.folder) / OWNER, run / RECORD):
        write_atomic(path, dumps(place.model_dump(), indent=2) + "\n")


def _read(path: Path) -> _Place:
    try:
        return _Place.model_validate(read_json(path))
    except ValidationError as error:
        what = f"the file does not say where the run's checkpoints are: {error.errors(include_url=False)[0]['msg']}"
        raise RunDirectoryError(what, where=str(path), fix="restore it from a copy") from error
