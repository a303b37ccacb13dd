"""Reads the rows, prompts and conversations that `Data` settings describe. Sources of any size are streamed, in their order."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml

from lockstep.config.data import Data
from lockstep.data.columns import BadRow, Columns, columns_of, row_key, to_conversation, to_prompt, tools_of
from lockstep.data.filters import Pipeline, Stage, stages_of
from lockstep.data.locate import Located, locate
from lockstep.data.presets import limited
from lockstep.data.sources import Row, generated_rows, read_rows
from lockstep.errors import DataError
from lockstep.types import Message, Prompt

SHOWN_ROWS = 10
AGAINST = "--against"
"""The option that names an evaluation set; it begins the `where` of the rows."""
HOPELESS = 1000
"""Number of bad rows without a good one after which reading stops: a column name is wrong."""
_LINE = 300
"""Longest line about a bad row."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat that ends with the assistant's turn."""

    id: str
    messages: tuple[Message, ...]
    tools: str = ""
    """Functions that its replies may call: see Prompt.tools."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts of one complete reading."""

    read: int
    """Rows in the sources."""
    bad: int
    """Rows that are unreadable or lack what a prompt needs."""
    problems: tuple[str, ...]
    """file:row and reason of the first ten bad ones."""
    stages: tuple[Stage, ...]
    """Rows dropped by each filter."""
    kept: int
    whole: bool = True
    """False if max_rows ended the reading."""


@dataclass(slots=True)
class _Tally:
    """Counts while the sources are read."""

    read: int = 0
    kept: int = 0
    bad: int = 0
    unreadable: int = 0
    """Bad rows that have no columns at all."""
    problems: list[str] = field(default_factory=list)
    reasons: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The first reasons, each with the first row that has it and the number of such rows."""

    def note(self, row: Row, reason: object) -> None:
        self.bad += 1
        self.unreadable += row.values is None
        first, count = self.reasons.get(str(reason), (f"{row.file.name}:{row.place}", 0))
        if count or len(self.reasons) < SHOWN_ROWS:
            self.reasons[str(reason)] = (first, count + 1)
        if len(self.problems) < SHOWN_ROWS:
            self.problems.append(f"{row.file.name}:{row.place}: {reason}"[:_LINE])

    @property
    def hopeless(self) -> bool:
        return self.bad == self.read >= HOPELESS


class Rows:
    """The rows of a Data after its filters. Each iteration reads the sources again and gives the same.

    `origin` names their source. `content_hash` (16 hex digits over the rows' numbers and values) identifies them:
    it is the same on every machine, and for jsonl and parquet of the same rows.
    """

    def __init__(self, data: Data, located: Located, where: str, *, whole: bool = False) -> None:
        self.data, self.located, self.where = limited(data), located, where
        self.columns: Columns = columns_of(data, whole=whole)
        self._stages = stages_of(
            data, self.columns, where, lambda other, place: open_rows(other, where=place, whole=True).prompts()
        )
        self._done: tuple[Reading, str] | None = None
        """Counts of the last complete reading, and the hash of its rows."""

    @property
    def name(self) -> str:
        """Short name, with which the ids of prompts and conversations begin."""
        return self.located.name

    @property
    def origin(self) -> str:
        return self.located.origin

    @property
    def content_hash(self) -> str:
        """Hash of the rows; reads the sources if no iteration has ended yet."""
        return self._read_once()[1]

    @property
    def reading(self) -> Reading:
        """Counts of the last complete reading; reads the sources if there was none."""
        return self._read_once()[0]

    def _read_once(self) -> tuple[Reading, str]:
        if self._done is None:
            for _ in self:
                pass
        assert self._done is not None  # an iteration sets it, or raises
        return self._done

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows that could be read and passed the filters.

        Raises DataError: with on_bad_row = stop at the end, if there were bad rows (it names the first ten); always if
        there was no row, or a generator gives different rows than last time.
        """
        for row, _ in self._mapped(lambda row: row):
            yield row

    def prompts(self, name: str = "", task: str = "") -> tuple[Prompt, ...]:
        """Return all rows as prompts, with ids "name/row", or "name/id" with an id column.

        `name` is the source's by default; `task`, the task that they name, is `name` by default. Raises DataError as
        iteration does, and for rows that are not a prompt or repeat an id.
        """
        name = name or self.name
        seen: dict[str, int] = {}

        def convert(row: Row) -> Prompt:
            assert row.values is not None  # unreadable rows are not converted
            return to_prompt(row.values, self._id(name, row, seen), task or name, self.columns)

        return tuple(prompt for _, prompt in self._mapped(convert))

    def conversations(self) -> Iterator[Conversation]:
        """Yield all rows as chats: the messages column, or prompt and answer as a user's and an assistant's turn.

        Raises DataError as `prompts` does.
        """
        seen: dict[str, int] = {}

        def convert(row: Row) -> Conversation:
            assert row.values is not None  # as above
            return Conversation(
                self._id(self.name, row, seen), to_conversation(row.values, self.columns), tools_of(row.values)
            )

        for _, conversation in self._mapped(convert):
            yield conversation

    def _id(self, name: str, row: Row, seen: dict[str, int]) -> str:
        """Return "name/row", or "name/id" with an id column. Raises BadRow if an id occurs twice."""
        key = row_key(row.values or {}, row.number, self.columns)
        if self.columns.id is not None:  # numbers are unique anyway
            if key in seen:
                raise BadRow(f"its id {key!r} is already the id of row {seen[key]}")
            seen[key] = row.place
        return f"{name}/{key}"

    def _mapped(self, convert: Callable[[Row], T]) -> Iterator[tuple[Row, T]]:
        """Yield every row that passes the filters and can be converted."""
        tally, pipeline, digest = _Tally(), Pipeline(self._stages), hashlib.sha256()
        whole = True
        for row in self._raw():
            tally.read += 1
            try:
                if row.values is None:
                    raise BadRow(row.problem)
                if not pipeline.keeps(row):
                    continue
                made = convert(row)
                digest.update(_canonical(row))
            except (BadRow, RecursionError) as bad:
                pipeline.bad.add(row.number)
                tally.note(row, bad if isinstance(bad, BadRow) else "its values are nested too deep")
                if tally.hopeless:
                    break
                continue
            tally.kept += 1
            yield row, made
            if tally.kept == self.data.max_rows:
                whole = False
                break
        self._finish(tally, pipeline, digest.hexdigest()[:16], whole)

    def _finish(self, tally: _Tally, pipeline: Pipeline, digest: str, whole: bool) -> None:
        stages = pipeline.report()
        if tally.bad and (self.data.on_bad_row == "stop" or not tally.kept):
            raise self._refusal(tally)
        if not tally.read:
            raise DataError("the source has no rows", where=self._place(), fix="give a source with at least one row")
        if not tally.kept:
            worst = max(stages, key=lambda stage: stage.dropped)
            raise DataError(
                f"no row passes the filters: of {tally.read} rows, the filter {worst.name} drops the most, {worst.dropped}",
                where=self._place(),
                fix=f"correct the filters; `lockstep data check` shows rows that {worst.name} drops",
            )
        if self.located.generator and self._done is not None and self._done[1] != digest:
            raise DataError(
                "the generator gave different rows when it was read a second time",
                where=self.located.generator,
                fix="make the rows depend on the generator's arguments alone: seed its random numbers",
            )
        reading = Reading(tally.read, tally.bad, tuple(tally.problems), stages, tally.kept, whole)
        self._done = reading, digest

    def _refusal(self, tally: _Tally) -> DataError:
        lines = [
            f"  {first}: {reason}"[:_LINE] + (f" (and {count - 1} more rows)" if count > 1 else "")
            for reason, (first, count) in tally.reasons.items()
        ]
        shown = "\n".join(lines)
        more = "; the first reasons" if sum(count for _, count in tally.reasons.values()) < tally.bad else ""
        first = "the first " if tally.hopeless else ""
        fix = f"correct or remove these rows, or set {self._with(on_bad_row='drop')}"
        if tally.unreadable == tally.read and self.located.generator:
            fix = "let the generator yield a dict of column to value for each row"
        elif tally.unreadable == tally.read:
            table = all(file.suffix.lower() == ".csv" for file in self.located.files)
            fix = (
                "save the file as UTF-8, every quotation closed, and each row with as many fields as the header"
                if table
                else "save the file as UTF-8 with one JSON object a line, each key once"
            )
        elif ".filters, " in self.where:  # a source of not_in, which has no settings of its own
            fix = "correct these rows, rename the column of their questions to prompt, or set the filter's preset"
        elif tally.bad == tally.read and self.data.messages is not None:
            fix = f"correct these rows, or set the column of the conversation: {self._with(messages='COLUMN')}"
        elif tally.bad == tally.read:
            fix = f"set the columns of the question and the answer: {self._with(prompt='COLUMN', answer='COLUMN')}"
        return DataError(
            f"{tally.bad} of {first}{tally.read} rows are bad{more}:\n{shown}", where=self._place(), fix=fix
        )

    def _with(self, **settings: str) -> str:
        """Return the source with these settings, or the settings alone, as the command line takes them."""
        if self.where.startswith(AGAINST):
            tree = self.data.model_dump(mode="json", exclude_unset=True, exclude={"messages"}) | settings
            text = yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
            return f"{AGAINST} {shlex.quote(text.strip())}"
        return " ".join(f"{self.where}.{name}={value}" for name, value in settings.items())

    def _place(self) -> str:
        return self.where if self.where.startswith(AGAINST) else f"{self.where}={self.origin}"

    def _raw(self) -> Iterator[Row]:
        if self.located.generator:
            yield from generated_rows(self.located.generator, self.data.settings)
            return
        several = len(self.located.files) > 1
        count = 0
        for file, label in zip(self.located.files, self.located.labels, strict=True):
            for row in read_rows(file):
                count += 1
                if several:
                    yield Row(count, row.values, row.problem, Path(label), row.place)
                else:
                    yield row


def open_rows(data: Data, *, where: str, whole: bool = False) -> Rows:
    """Return the rows that `data` means; hub files are fetched now and read during iteration.

    `where` is the setting's path, for errors. With `whole` prompts keep every column, for graders that read rows themselves.
    Raises DataError for a source that cannot be found or fetched.
    """
    located = locate(data, where)
    return Rows(located.data or data, located, where, whole=whole)


def _canonical(row: Row) -> bytes:
    """Return a row as bytes that do not depend on the format it was read from. Raises BadRow for what is no JSON."""
    values = [row.number, row.values]
    try:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=repr)
    except (TypeError, ValueError) as error:  # keys of several types, or a list that holds itself
        raise BadRow(f"its values cannot be written as JSON: {error}") from error
    return text.encode("utf-8", "surrogatepass")
