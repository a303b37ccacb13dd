"""Strict JSON, and files with one JSON object per line that stay readable if they were cut off anywhere.

JSON has no NaN and no infinity; they are written as the strings "nan", "inf" and "-inf" (`number` reads them back).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError
from lockstep.track.files import Appender, Closing, read_plain

NON_FINITE = {"nan", "inf", "-inf"}


def strict(value: object) -> Any:
    """Return the value in terms of JSON: records become objects, tuples lists, paths text, non-finite numbers strings.

    Raises TypeError for anything else, so that nothing is written as its `repr` by accident.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): strict(item) for key, item in value.items()}
        case Path():
            return str(value)
        case Sequence() | set() | frozenset():
            return [strict(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return strict(asdict(value))
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def dumps(value: object, *, indent: int | None = None) -> str:
    """Strict JSON text, ASCII only, so that a lone surrogate in a reply cannot make the file unreadable."""
    return json.dumps(strict(value), allow_nan=False, indent=indent)


def number(value: object) -> float:
    """Read a number that `strict` wrote. Raises TypeError if it is none."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError as error:
            raise TypeError("a number beyond those of 64 bits") from error
    if isinstance(value, str) and value in NON_FINITE:
        return float(value)
    raise TypeError(f"not a number: {value!r}")


def parse_json(text: str | bytes) -> Any:
    """json.loads that raises ValueError for every text that it cannot read, one that is nested too deep as well."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_json(path: Path) -> Any:
    """Return the content of one JSON file. Raises RunDirectoryError if it is missing or broken."""
    try:
        return parse_json(read_plain(path))
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise RunDirectoryError(
            f"the file is not JSON: {error}", where=str(path), fix="restore it from a copy"
        ) from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, in order; an unfinished last line (a write under way, or cut off) is left out.

    A missing file is an empty one. Raises RunDirectoryError, naming the line, if any other line is broken.
    """
    body, rest = _split(_content(path))
    records: list[dict[str, Any]] = []
    for index, line in enumerate(body.split(b"\n")[:-1], start=1):
        record = _parse(line)
        if record is None:
            what = f"the line is not a JSON object; it was changed after it was written: {line[:80]!r}"
            raise RunDirectoryError(
                what, where=f"{path}:{index}", fix="restore the file from a backup, or delete that line"
            )
        records.append(record)
    last = _parse(rest)
    return records if last is None else [*records, last]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The lines of a file up to some moment: a file that only grows begins with them for ever. Example: Prefix(5120, "9f…")"""

    bytes: int
    sha256: str

    def begins(self, path: Path) -> bool:
        """True if the file still begins with these bytes. Raises RunDirectoryError if it cannot be read."""
        content = _content(path)
        return len(content) >= self.bytes and hashlib.sha256(content[: self.bytes]).hexdigest() == self.sha256


class JsonlFile(Closing):
    """A file open for appending. A torn last line, left by a process that was killed, is moved to `<name>.torn` first.

    A last line that only lacks its newline is complete and is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = _mend(path)
        """Bytes that were moved aside when the file was opened."""
        content = _content(path)
        self._bytes, self._digest = len(content), hashlib.sha256(content)
        self._file = Appender(path)

    def append(self, record: Mapping[str, object]) -> None:
        """Add one line and flush it to disk; one that does not fit leaves nothing behind. Raises StorageError."""
        line = dumps(record).encode() + b"\n"
        self._file.append(line)
        self._bytes += len(line)
        self._digest.update(line)

    @property
    def prefix(self) -> Prefix:
        """Everything that the file holds now."""
        return Prefix(self._bytes, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def _content(path: Path) -> bytes:
    """Return the bytes of a file; a missing one is empty."""
    try:
        return read_plain(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Return the part that ends in a newline, and the rest."""
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _mend(path: Path) -> int:
    """Make the file end in a newline; returns the bytes moved to `<name>.torn`."""
    body, rest = _split(_content(path))
    if not rest:
        return 0
    if _parse(rest) is not None:
        _append(path, b"\n")
        return 0
    # The copy is made first: if this process is killed in between, the line is copied twice and nothing is lost.
    _append(path.with_name(f"{path.name}.torn"), rest + b"\n")
    os.truncate(path, len(body))
    return len(rest)


def _append(path: Path, data: bytes) -> None:
    with Appender(path) as file:
        file.append(data)
