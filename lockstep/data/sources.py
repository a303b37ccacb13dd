"""Rows of jsonl and parquet files as prompts. Every bad row is found before a run starts, and named as file:row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from lockstep.errors import DataError
from lockstep.types import Message, Prompt

SHOWN_ROWS = 10
_LINE = 300
"""Longest line about a bad row."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what. Example: Columns(prompt="input", answer="label")"""

    prompt: str = "prompt"
    """Text, or a list of messages with role and content."""
    answer: str = "answer"
    """Text or a number."""
    id: str | None = None
    """None numbers the rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file; `values` is None if it could not be read, and `problem` says why."""

    number: int
    """From 1: the line of a jsonl file, the row of a parquet file."""
    values: Mapping[str, object] | None
    problem: str = ""


class _BadRow(Exception):
    """Why a row is no prompt."""


def read_prompts(path: Path, columns: Columns, name: str, task: str = "") -> tuple[Prompt, ...]:
    """All prompts of a file, in order. Ids are "name/row", or "name/id" with an id column; other columns are in `data`.

    `task` is what the prompts say that asked them; none takes `name`.

    Raises DataError if the file is missing, empty or unreadable, or any row is bad; it names the first ten bad rows.
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    first_row: dict[str, int] = {}
    total = 0
    for row in read_rows(path):
        total += 1
        try:
            prompt = _prompt(row, columns, name, task or name)
            if prompt.id in first_row:
                raise _BadRow(f"its id {prompt.id!r} is already the id of row {first_row[prompt.id]}")
            first_row[prompt.id] = row.number
            prompts.append(prompt)
        except _BadRow as bad:
            problems.append(f"{path.name}:{row.number}: {bad}"[:_LINE])
    if problems:
        shown = "\n".join(f"  {line}" for line in problems[:SHOWN_ROWS])
        more = f"; the first {SHOWN_ROWS}" if len(problems) > SHOWN_ROWS else ""
        raise DataError(
            f"{len(problems)} of {total} rows are bad{more}:\n{shown}",
            where=str(path),
            fix="correct or remove these rows, or correct the column names of the task",
        )
    if not prompts:
        raise DataError("the file has no rows", where=str(path), fix="give a file with at least one row")
    return tuple(prompts)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl or .parquet file, one at a time. Blank lines of a jsonl file are no rows.

    Raises DataError if the file is missing or of another kind, or a parquet file is damaged.
    """
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".jsonl", ".parquet"))
        near = get_close_matches(path.name, beside, n=3, cutoff=0.3)
        fix = f"did you mean {' or '.join(near)}?" if near else f"give a path that exists from {Path.cwd()}"
        raise DataError("there is no such file", where=str(path), fix=fix)
    match path.suffix:
        case ".jsonl":
            yield from _jsonl(path)
        case ".parquet":
            yield from _parquet(path)
        case suffix:
            raise DataError(
                f"cannot read {suffix or 'a file without suffix'}", where=str(path), fix="use .jsonl or .parquet"
            )


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                values = json.loads(text, parse_constant=_no_constant)
            except UnicodeDecodeError as error:
                yield Row(number, None, f"not UTF-8 at byte {error.start}")
            except (ValueError, RecursionError) as error:
                yield Row(number, None, f"malformed JSON: {error}")
            else:
                if isinstance(values, dict):
                    yield Row(number, values)
                else:
                    yield Row(number, None, f"a JSON object is expected, this is {_kind(values)}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, values)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"the parquet file cannot be read after row {number}: {reason}",
            where=str(path),
            fix="write or copy it again",
        ) from error


def _prompt(row: Row, columns: Columns, name: str, task: str) -> Prompt:
    if row.values is None:
        raise _BadRow(row.problem)
    key = str(row.number) if columns.id is None else _id(_value(row.values, columns.id), columns.id)
    used = {columns.prompt, columns.answer, columns.id}
    return Prompt(
        id=f"{name}/{key}",
        messages=_messages(_value(row.values, columns.prompt), columns.prompt),
        answer=_answer(_value(row.values, columns.answer), columns.answer),
        task=task,
        data={column: value for column, value in row.values.items() if column not in used},
    )


def _value(values: Mapping[str, object], column: str) -> object:
    if column not in values:
        near = get_close_matches(column, values, n=1, cutoff=0.5)
        has = ", ".join(map(repr, list(values)[:8])) or "none"
        hint = f"did you mean {near[0]!r}?" if near else f"it has {has}"
        raise _BadRow(f"there is no column {column!r}; {hint}")
    if values[column] is None:
        raise _BadRow(f"{column!r} is null")
    return values[column]


def _id(value: object, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _BadRow(f"{column!r} must be text or a whole number, this is {_kind(value)}")
    return _text(str(value), column)


def _answer(value: object, column: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise _BadRow(f"{column!r} is {value}, not a finite number")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _BadRow(f"{column!r} must be text or a number, this is {_kind(value)}")
    return _text(value if isinstance(value, str) else repr(value), column)


def _messages(value: object, column: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role="user", content=_text(value, column)),)
    if not isinstance(value, list):
        raise _BadRow(f"{column!r} must be text or a list of messages, this is {_kind(value)}")
    messages = tuple(_message(turn, f"{column}[{index}]") for index, turn in enumerate(value))
    if not messages or messages[-1]["role"] != "user":
        raise _BadRow(f"{column!r} must end with a user message")
    return messages


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise _BadRow(f"{place} must have role and content, and nothing else")
    role, content = value["role"], value["content"]
    if role not in ROLES:
        raise _BadRow(f"{place}.role must be one of {', '.join(ROLES)}, not {role!r}")
    if not isinstance(content, str):
        raise _BadRow(f"{place}.content must be text, this is {_kind(content)}")
    return Message(role=role, content=_text(content, f"{place}.content"))


def _text(text: str, column: str) -> str:
    if not text.strip():
        raise _BadRow(f"{column!r} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRow(f"{column!r} has a lone surrogate at character {error.start}") from error
    return text


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
