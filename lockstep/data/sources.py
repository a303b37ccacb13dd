"""Reads the rows of files and generators, one at a time. A row that cannot be read gets a reason; the others are still read."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.codec import strict_json
from lockstep.data.columns import kind_of
from lockstep.errors import DataError
from lockstep.user_code import describe, load_callable

BATCH_BYTES, MOST_ROWS = 256 << 20, 256
"""Bytes and rows of a parquet file that are held at once."""
FIELD_LIMIT = 16 << 20
"""Longest field of a csv file, in characters."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `values` is None if it could not be read, and `problem` says why."""

    number: int
    """Number from 1, unique in a source: the place in a single file, a running count over several files."""
    values: Mapping[str, object] | None
    problem: str = ""
    file: Path = Path()
    place: int = 0
    """Line of a jsonl or csv file, or row of a parquet file, from 1."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a .jsonl, .json, .csv or .parquet file, one at a time. Blank lines are skipped.

    Raises DataError if the file is of another kind, or a parquet file is damaged.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise DataError(
            "this is a pipe or device, not a regular file",
            where=str(path),
            fix="write the rows into a regular file",
        )
    match path.suffix.lower():
        case ".jsonl":
            yield from _jsonl(path)
        case ".json":
            yield from _json(path)
        case ".csv":
            yield from _csv(path)
        case ".parquet":
            yield from _parquet(path)
        case suffix:
            raise DataError(
                f"files of type {suffix or '(no suffix)'} cannot be read",
                where=str(path),
                fix="give a file that ends in .parquet, .jsonl, .json or .csv",
            )


def generated_rows(spec: str, settings: Mapping[str, object]) -> Iterator[Row]:
    """Yield the rows of a function file.py:name called with the settings: mappings of column to value.

    Raises DataError if it is missing or fails.
    """
    file = Path(spec.rpartition(":")[0]).expanduser()
    function = load_callable(spec, DataError)
    number = 0
    try:
        for values in function(**settings):
            number += 1
            if isinstance(values, dict) and all(isinstance(key, str) for key in values):
                yield Row(number, values, "", file, number)
            else:
                yield Row(number, None, f"a mapping of columns is expected, this is {kind_of(values)}", file, number)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"the generator failed after row {number}: {describe(error, file)}",
            where=spec,
            fix="correct the generator, or the settings that are its arguments",
        ) from error


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                values = strict_json(text, distinct=True)
            except UnicodeDecodeError as error:
                yield Row(number, None, f"not UTF-8 at byte {error.start}", path, number)
            except ValueError as error:
                yield Row(number, None, f"malformed JSON: {error}", path, number)
            else:
                yield _object(values, number, path)


def _object(values: object, number: int, path: Path) -> Row:
    if isinstance(values, dict):
        return Row(number, values, "", path, number)
    return Row(number, None, f"a JSON object is expected, this is {kind_of(values)}", path, number)


def _json(path: Path) -> Iterator[Row]:
    """Yield the objects of a list, or of lines: many hub data sets give jsonl the suffix .json."""
    with path.open("rb") as file:
        start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from _jsonl(path)
        return
    try:
        items = strict_json(path.read_bytes().decode("utf-8-sig"), distinct=True)
    except ValueError as error:
        raise DataError(
            f"the file is not valid JSON: {error}", where=str(path), fix="write or copy the file again"
        ) from error
    for number, item in enumerate(items, start=1):
        yield _object(item, number, path)


def _csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file; its first line names the columns. All values are text; empty ones are empty text."""
    csv.field_size_limit(FIELD_LIMIT)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            number = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                yield Row(number, None, f"malformed CSV: {error}", path, number)
                continue
            if fields is None:
                return
            if not fields:
                continue
            if header is None:
                header = fields
                if twice := next((name for name in header if header.count(name) > 1), None):
                    raise DataError(f"two columns are called {twice!r}", where=f"{path}:1", fix="rename one of them")
            elif len(fields) != len(header):
                problem = f"it has {len(fields)} fields, the header {len(header)}"
                yield Row(number, None, problem, path, number)
            elif any("\udc80" <= char <= "\udcff" for field in fields if not field.isascii() for char in field):
                yield Row(number, None, "not UTF-8", path, number)
            else:
                yield Row(number, dict(zip(header, fields, strict=True)), "", path, number)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = _batch_rows(file.metadata.row_group(group))
                for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
                    if batch.nbytes > BATCH_BYTES and batch.num_rows == 1:
                        raise pa.ArrowInvalid(f"a row of {batch.nbytes:,} bytes, more than {BATCH_BYTES:,}")
                    for values in batch.to_pylist():
                        number += 1
                        yield Row(number, values, "", path, number)
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"the parquet file cannot be read after row {number}: {reason}",
            where=str(path),
            fix="write or copy the file again",
        ) from error


def _batch_rows(group: Any) -> int:
    """Return the number of rows to hold at once: few enough for BATCH_BYTES, even if all have a column's largest value.

    A dictionary is stored once, however many rows refer to one of its values: kilobytes may expand to gigabytes.
    """
    columns = [group.column(i) for i in range(group.num_columns)]
    mean = sum(column.total_uncompressed_size for column in columns) / max(1, group.num_rows)
    shared = sum(c.total_uncompressed_size for c in columns if any("DICTIONARY" in one for one in c.encodings))
    return max(1, min(MOST_ROWS, int(BATCH_BYTES / max(1, mean, shared))))
