"""Finds an export that exists already: made from the same weights and settings, every file intact. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

import lockstep
from lockstep.errors import ConfigError
from lockstep.export.files import KEPT, new_folder
from lockstep.models.cache import cache_root, sha256_of
from lockstep.models.resolve import resolve
from lockstep.scoring.targets import Target

RECORD = "lockstep_export.json"


def made_of(target: Target, kind: str, shard_bytes: int) -> dict[str, Any]:
    """Return everything that the files of an export follow from; {} for weights of no checkpoint, which have no fingerprint yet.

    The card is not among them: it is written again from the scores on record.
    """
    if target.checkpoint is None:
        return {}
    folder = resolve(target.recipe.model).path
    beside = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in KEPT]
    return {
        "weights": target.checkpoint.meta["fingerprint"],
        "step": target.step,
        "model": target.recipe.model.model_dump(mode="json"),
        "folder": str(folder),
        "beside": {path.name: sha256_of(path) for path in beside},
        "adapter": target.recipe.adapter.model_dump(mode="json"),
        "kind": kind,
        "shard_bytes": shard_bytes,
        "versions": [lockstep.__version__, version("transformers")],
    }


def cached_place(key: dict[str, Any]) -> Path:
    """Return the folder in the cache of an export without OUT. Raises ConfigError for weights of no checkpoint."""
    if not key:
        raise ConfigError(
            ["OUT is missing: only a checkpoint of a run can be exported into the cache"],
            fix="give a new folder as OUT",
        )
    return cache_root() / "exports" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def making_alone(key: dict[str, Any]) -> FileLock:
    """Return a lock: of several processes one makes an export in the cache, and the others find it."""
    place = cached_place(key)
    place.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{place}.lock")


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of an export but its record."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    own = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: sha256_of(path) if path.is_file() and not path.is_symlink() else ""
        for name, path in own.items()
        if name != RECORD
    }


@dataclass(frozen=True, slots=True)
class Place:
    """Folder of an export, and the export that is in it already."""

    path: Path
    record: dict[str, Any] | None = None
    """Record of an export that is the wanted one, every file whole."""
    replaced: bool = False
    """An export in that place gives way to the new one."""


def look(out: Path | None, key: dict[str, Any], *, again: bool) -> Place:
    """Find the place: `out`, or without it one in the cache. `again`: make a whole export again, or replace another one.

    Raises ConfigError if `out` holds anything that is neither the wanted export nor its damaged files.
    """
    path = out if out is not None else cached_place(key)
    try:
        record = {} if path.is_symlink() else json.loads((path / RECORD).read_bytes())
        files, same = dict(record["files"]), bool(key) and record["made_of"] == key
        label = record["source"]["label"]
    except (OSError, ValueError, TypeError, KeyError):
        if out is None and path.exists():
            return Place(path, replaced=True)
        return Place(new_folder(path))
    found = hashes(path)
    if foreign := sorted(found.keys() - files.keys()):
        raise ConfigError([f"{path} exists already and holds a file that is not of the export: {foreign[0]}"], fix=_FIX)
    if same and found == files and not again:
        return Place(path.absolute(), record)
    if not same and not again:
        raise ConfigError([f"{path} holds another export already: of {label} or with other options"], fix=_FIX)
    return Place(path.parent.resolve() / path.name, replaced=True)


_FIX = "give a new folder; --again replaces a folder that holds only an export"
