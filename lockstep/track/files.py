"""Reads and writes files of a run: regular files only, through no link; complete or absent; a full disk is a StorageError."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from lockstep.errors import RunDirectoryError, StorageError
from lockstep.models.cache import sync_to_disk

TEMPORARY = ".*.tmp"
"""Glob of what an interrupted write leaves behind."""


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a plain file and return its descriptor. Links are not followed, and a pipe without a writer is not waited for.

    A run may come from a stranger: a link in it would have us read, empty or append to a file elsewhere.
    Raises RunDirectoryError for anything but a plain file, OSError as os.open does.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_plain(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_plain(path)
    return descriptor


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file. Raises as `open_plain` does."""
    with os.fdopen(open_plain(path), "rb") as file:
        return file.read()


def require_plain(folder: Path, *, skip: frozenset[str] = frozenset()) -> None:
    """Raise RunDirectoryError if anything below `folder` is neither folder nor plain file; those in `skip` are not entered."""
    for inner, folders, names in os.walk(folder):
        for name in (*folders, *names):
            try:
                mode = (Path(inner) / name).lstat().st_mode
            except FileNotFoundError:  # a run that is going on removes and renames
                continue
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise _not_plain(Path(inner) / name)
        if Path(inner) == folder:
            folders[:] = [name for name in folders if name not in skip]


class Closing:
    """An object that is closed at the end of a `with` statement."""

    def close(self) -> None:
        """Let go of what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Appender(Closing):
    """A file that only grows, by whole pieces: one that does not fit on the disk leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storing(path):
            self._descriptor: int | None = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def append(self, data: bytes, *, flush: bool = True) -> None:
        """Write `data` at the end; `flush` waits until the disk has it. Raises StorageError."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        before = os.fstat(self._descriptor).st_size
        with storing(self.path):
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                if flush:
                    os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, before)
                raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write `path` into a StorageError that says how much room there is and what to do."""
    try:
        yield
    except OSError as error:
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        free = f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB are free there"
        raise StorageError(
            f"cannot be written: {os.strerror(error.errno) if error.errno else error}; {free}",
            where=str(path),
            fix="free space or make the folder writable, then repeat the command or resume the run; earlier files are complete",
        ) from error


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success flush it to disk and give it its real name.

    If the body raises, the temporary file is removed and `path` stays as it was. Raises StorageError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storing(path):
        try:
            temporary.unlink(missing_ok=True)  # a link of that name would be followed
            yield temporary
            sync_to_disk(temporary)
            temporary.replace(path)
            sync_to_disk(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace the file's content at once. Text is UTF-8. Raises StorageError."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def remove_temporary(folder: Path) -> None:
    """Remove what interrupted writes left in `folder`. For the holder of the run's lock only."""
    leftovers = [path for path in folder.glob(TEMPORARY) if not path.is_dir()] if folder.is_dir() else []
    for leftover in leftovers:
        leftover.unlink()


def _not_plain(path: Path) -> RunDirectoryError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return RunDirectoryError(
        f"this is {kind}, but everything in a run directory must be a regular file",
        where=str(path),
        fix="replace it by the file itself, or remove it; to keep runs on another disk, set runs_dir",
    )


def existing(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above that is there."""
    place = folder.absolute()
    return next(one for one in (place, *place.parents) if one.is_dir())
