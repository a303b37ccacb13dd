"""Folders in the user's cache: written once and atomically, and verified on every use."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from lockstep.errors import ModelError

MANIFEST = "manifest.json"
"""Size and SHA-256 of every other file of a cached folder."""


def cache_root() -> Path:
    """Return LOCKSTEP_CACHE, or else ~/.cache/lockstep (XDG_CACHE_HOME is honoured). An empty variable counts as unset."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "lockstep"


def cached_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, checked against its manifest; built first if it does not exist.

    `build` fills an empty temporary folder beside it, which is then renamed: no reader sees half a folder, and of
    several processes only one builds. The whole content is hashed on each use: 540 MB take half a second, and the
    weights are read anyway.

    Raises:
        ModelError: a file is missing, or its bytes are not those that were written.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.exists():
                _build(folder, build)
                return folder
    _verify(folder)
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "content"
        fresh.mkdir()
        build(fresh)
        files = {
            path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(fresh.iterdir())
        }
        (fresh / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
        for path in fresh.iterdir():
            sync_to_disk(path)
        fresh.rename(folder)
        sync_to_disk(folder.parent)


def sync_to_disk(path: Path) -> None:
    """fsync a file, or a folder so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verify(folder: Path) -> None:
    if wrong := _wrong_file(folder):
        raise ModelError(
            f"the cached model is damaged: {wrong} has changed since it was written",
            where=str(folder),
            fix="delete this folder; it is made again at the next use",
        )


def _wrong_file(folder: Path) -> str | None:
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, expected in files.items():
            path = folder / name
            if path.stat().st_size != expected["size"] or sha256_of(path) != expected["sha256"]:
                return str(name)
    except FileNotFoundError as error:
        return Path(error.filename).name
    except (ValueError, KeyError, TypeError, AttributeError):
        return MANIFEST
    return None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
