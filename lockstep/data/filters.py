"""Named filters of rows: each keeps or drops a row, counts the dropped rows, and shows five of them."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, assert_never

from lockstep.config.data import (
    Among,
    Data,
    Distinct,
    Filter,
    Gradable,
    IntegerAnswer,
    Length,
    Mentions,
    NotAmong,
    NotIn,
    NotMentions,
    PythonFilter,
    Tokens,
    stage_name,
)
from lockstep.data.columns import BadRow, Columns, answer_of, cell, kind_of, question_of, value_at
from lockstep.data.overlap import Index, add_question, finds
from lockstep.data.presets import preset_of
from lockstep.data.questions import question_digest, raw_digest
from lockstep.data.sources import Row
from lockstep.errors import DataError
from lockstep.types import Prompt
from lockstep.user_code import describe, load_callable
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.extract import MINUS
from lockstep.verifiers.normalise import MAX_DIGITS, plain, ungrouped
from lockstep.verifiers.selftest import self_test

EXAMPLES = 5
_SHOWN = 120

Keep: TypeAlias = Callable[[Row], bool]
ReadPrompts: TypeAlias = Callable[[Data, str], Iterable[Prompt]]
"""Returns the prompts of a Data; the second argument is the setting that names it."""


@dataclass(frozen=True, slots=True)
class Example:
    """A dropped row. Example: Example(17, "train.jsonl:17", "Prove that …", "'proof'")"""

    number: int
    place: str
    """file:row"""
    question: str
    """Start of the question."""
    looked_at: str
    """Text that the filter judged; "" if that is the question."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Result of one filter in a reading."""

    name: str
    kind: str
    before: int
    """Rows that reached it."""
    dropped: int
    examples: tuple[Example, ...]
    """Five of the dropped rows, spread over the sources by a hash of their number, in their order."""

    @property
    def after(self) -> int:
        return self.before - self.dropped


@dataclass(frozen=True, slots=True)
class Ready:
    """A filter that can run; `make` returns its decision function with nothing remembered, from the numbers of bad rows."""

    name: str
    kind: str
    make: Callable[[set[int]], Keep]
    show: Callable[[Row], str]
    """Returns the part of a dropped row that the filter judged."""
    columns: Columns


@dataclass(slots=True)
class _Running:
    ready: Ready
    keep: Keep
    before: int = 0
    dropped: int = 0
    chosen: list[tuple[int, int, Row]] = field(default_factory=list)
    """Heap of the dropped rows with the lowest hashes: (-hash, -number, row)."""


class Pipeline:
    """One run of the filters over the rows of a reading."""

    def __init__(self, stages: Sequence[Ready]) -> None:
        self.bad: set[int] = set()
        """Numbers of the bad rows so far, whose good copies may follow."""
        self._stages = [_Running(stage, stage.make(self.bad)) for stage in stages]

    def keeps(self, row: Row) -> bool:
        """Return whether all filters keep it. Raises BadRow if one cannot judge it; that row counts for no filter."""
        passed: list[_Running] = []
        for stage in self._stages:
            if stage.keep(row):
                passed.append(stage)
                continue
            stage.dropped += 1
            stage.before += 1
            rank = zlib.crc32(b"%d" % row.number)
            if len(stage.chosen) < EXAMPLES:
                heapq.heappush(stage.chosen, (-rank, -row.number, row))
            elif -rank > stage.chosen[0][0]:
                heapq.heapreplace(stage.chosen, (-rank, -row.number, row))
            break
        for stage in passed:
            stage.before += 1
        return len(passed) == len(self._stages)

    def report(self) -> tuple[Stage, ...]:
        return tuple(
            Stage(
                stage.ready.name,
                stage.ready.kind,
                stage.before,
                stage.dropped,
                tuple(_example(stage.ready, row) for _, _, row in sorted(stage.chosen, key=lambda c: c[2].number)),
            )
            for stage in self._stages
        )


def _example(stage: Ready, row: Row) -> Example:
    try:
        question = question_of(row.values or {}, stage.columns)[-1]["content"]
    except BadRow as bad:
        question = f"({bad})"
    place = f"{row.file.name}:{row.place}"
    return Example(row.number, place, _cut(question), _cut(stage.show(row)))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"


def stages_of(data: Data, columns: Columns, where: str, read_prompts: ReadPrompts) -> tuple[Ready, ...]:
    """Return the preset's filters, then the settings'. `read_prompts` opens other data for the filter `not_in`.

    Raises DataError or TaskError if one cannot be made.
    """
    preset = preset_of(data)
    found = [*(preset.filters if preset else ()), *data.filters]
    return tuple(
        _ready(settings, columns, f"{where}.filters, {stage_name(settings)}", read_prompts) for settings in found
    )


def _ready(settings: Filter, columns: Columns, where: str, read_prompts: ReadPrompts) -> Ready:
    make: Callable[[set[int]], Keep]

    def look(paths: Sequence[str]) -> Callable[[Row], str]:
        return lambda row: ", ".join(f"{path} = {_raw(row, path)!r}" for path in paths)

    show = look(())  # nothing, for filters that judge the question, which an example shows anyway
    match settings:
        case Among() | NotAmong():
            make, show = _constant(_among(settings)), look(settings.columns)
        case Mentions() | NotMentions():
            make, show = _constant(_mentions(settings)), look([settings.column])
        case IntegerAnswer():
            make, show = _constant(_integer(settings, columns)), look([columns.messages or columns.answer])
        case Gradable():
            make, show = _constant(_gradable(settings, columns)), look([columns.messages or columns.answer])
        case Length():
            make, show = _constant(_length(settings, columns)), lambda row: f"{len(_question(row, columns))} characters"
        case Tokens():
            count = _counter(settings, columns)
            make, show = _constant(lambda row: count(row) <= settings.high), lambda row: f"{count(row)} tokens"
        case Distinct():
            make = _distinct(settings, columns)
        case NotIn():
            make = _constant(_not_in(settings, columns, where, read_prompts))
        case PythonFilter():
            make, show = _constant(_own(settings)), lambda row: repr(dict(row.values or {}))
        case _:
            assert_never(settings)
    return Ready(stage_name(settings), settings.kind, make, show, columns)


def _constant(keep: Keep) -> Callable[[set[int]], Keep]:
    """Wrap a filter that remembers nothing."""
    return lambda _: keep


def _raw(row: Row, path: str) -> object:
    try:
        return value_at(row.values or {}, path)
    except BadRow:
        return None


def _question(row: Row, columns: Columns) -> str:
    return "\n".join(turn["content"] for turn in question_of(row.values or {}, columns))


def _among(settings: Among | NotAmong) -> Keep:
    # bool is int to Python: the type is compared too, so that true is not 1
    wanted = {(type(value), value) for value in settings.values}
    paths = settings.columns

    def holds(row: Row, path: str) -> bool:
        value = cell(row.values or {}, path)
        return isinstance(value, str | bool | int) and (type(value), value) in wanted

    if isinstance(settings, Among):
        return lambda row: all(holds(row, path) for path in paths)
    return lambda row: not any(holds(row, path) for path in paths)


def _mentions(settings: Mentions | NotMentions) -> Keep:
    texts, wanted = [text.casefold() for text in settings.texts], isinstance(settings, Mentions)

    def keep(row: Row) -> bool:
        value = cell(row.values or {}, settings.column)
        if value is not None and not isinstance(value, str):
            raise BadRow(f"{settings.column!r} must be text, this is {kind_of(value)}")
        folded = (value or "").casefold()
        return any(text in folded for text in texts) is wanted

    return keep


def as_integer(text: str) -> int | None:
    """Return the whole number that an answer is written as, or None: 12, +3, $1{,}234$, −5. Takes linear time."""
    body = plain(text.translate(MINUS) if not text.isascii() else text)
    digits = body.removeprefix("-") if body.startswith("-") else body.removeprefix("+")
    joined = ungrouped(digits)
    if not joined or len(joined) > MAX_DIGITS:
        return None
    return -int(joined) if body.startswith("-") else int(joined)


def _integer(settings: IntegerAnswer, columns: Columns) -> Keep:
    low, high = settings.low, settings.high

    def keep(row: Row) -> bool:
        text = _answer(row, columns)
        number = None if text is None else as_integer(text)
        return number is not None and (low is None or number >= low) and (high is None or number <= high)

    return keep


def _answer(row: Row, columns: Columns) -> str | None:
    """Return the reference answer, None if the row has none that can be read. Raises BadRow if there is no such column."""
    column = columns.messages or columns.answer
    if column not in (row.values or {}) and "." not in column:
        value_at(row.values or {}, column)
    try:
        return answer_of(row.values or {}, columns)
    except BadRow:
        return None


def _gradable(settings: Gradable, columns: Columns) -> Keep:
    verifier = build_verifier(settings.verifier)

    def keep(row: Row) -> bool:
        answer = _answer(row, columns)
        if answer is None:
            return False
        prompt = Prompt(f"row {row.number}", question_of(row.values or {}, columns), answer, data=row.values or {})
        return not self_test(verifier, prompt)

    return keep


def _length(settings: Length, columns: Columns) -> Keep:
    low, high = settings.low, settings.high

    def keep(row: Row) -> bool:
        size = len(_question(row, columns))
        return low <= size and (high is None or size <= high)

    return keep


def _counter(settings: Tokens, columns: Columns) -> Callable[[Row], int]:
    from lockstep.config.schema import Model
    from lockstep.models.load import load_tokenizer  # imports transformers
    from lockstep.models.resolve import resolve

    tokenizer = load_tokenizer(resolve(Model(path=settings.model)))
    return lambda row: len(tokenizer(_question(row, columns), add_special_tokens=False)["input_ids"])


def _distinct(settings: Distinct, columns: Columns) -> Callable[[set[int]], Keep]:
    digest = question_digest if settings.match == "normalised" else raw_digest

    def make(bad: set[int]) -> Keep:
        seen: dict[bytes, int] = {}

        def keep(row: Row) -> bool:
            key = digest(question_of(row.values or {}, columns))[:16]
            if key in seen and seen[key] not in bad:
                return False
            seen[key] = row.number
            return True

        return keep

    return make


def _not_in(settings: NotIn, columns: Columns, where: str, read_prompts: ReadPrompts) -> Keep:
    index = Index()
    for source in settings.sources:
        for prompt in read_prompts(Data(source=source, preset=settings.preset), where):
            add_question(index, prompt.id, prompt.messages)
    return lambda row: not finds(index, question_of(row.values or {}, columns), settings.match)


def _own(settings: PythonFilter) -> Keep:
    function = load_callable(settings.path, DataError)
    file = Path(settings.path.rpartition(":")[0]).expanduser()

    def keep(row: Row) -> bool:
        try:
            verdict = function(dict(row.values or {}))
        except (Exception, SystemExit) as error:
            raise DataError(
                f"the filter function failed at row {row.number}: {describe(error, file)}",
                where=settings.path,
                fix="correct the filter function",
            ) from error
        if not isinstance(verdict, bool):
            raise DataError(
                f"the filter function returned {verdict!r} for row {row.number}, neither True nor False",
                where=settings.path,
                fix="return True to keep a row, False to drop it",
            )
        return verdict

    return keep
