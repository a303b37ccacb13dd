"""Whole files, written so that a reader sees the old one or the new one and never half of either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".*.tmp"
"""Glob of what an interrupted write leaves behind."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success flush it to disk and give it its real name.

    If the body raises, the temporary file is removed and `path` stays as it was. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_to_disk(temporary)
        temporary.replace(path)
        sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace the file's content at once. Text is UTF-8. Raises OSError."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def sync_to_disk(path: Path) -> None:
    """fsync a file, or a folder so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary(folder: Path) -> int:
    """Remove what interrupted writes left in `folder`; returns how many. For the holder of the run's lock only."""
    leftovers = list(folder.glob(TEMPORARY)) if folder.is_dir() else []
    for leftover in leftovers:
        leftover.unlink()
    return len(leftovers)
