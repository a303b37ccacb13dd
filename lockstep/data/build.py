"""Writes data sets as files, with a manifest of sources, settings, counts and SHA-256.

The same sources and settings give the same bytes on every machine: no time and no machine path is written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from lockstep import __version__
from lockstep.data.columns import TOOLS
from lockstep.data.load import Reading, Rows
from lockstep.data.overlap import NGRAM, Overlap, measure
from lockstep.data.questions import data_hash, question_digest
from lockstep.data.sets import Loaded, overlaps
from lockstep.data.split import refuse_overlap
from lockstep.errors import DataError
from lockstep.models.cache import sha256_of
from lockstep.track.files import atomic_path, write_atomic
from lockstep.types import Prompt

Format: TypeAlias = Literal["jsonl", "parquet"]
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Names:
    """Column names of a built file."""

    prompt: str = "prompt"
    answer: str = "answer"
    id: str = "id"


@dataclass(frozen=True, slots=True)
class FileHash:
    """A file and what is in it."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a set."""

    set: str
    origin: str
    commit: str | None
    files: tuple[FileHash, ...]
    settings: Mapping[str, object]
    """Settings of the Data, without those that are none."""
    reading: Reading
    content_hash: str


@dataclass(frozen=True, slots=True)
class Output:
    """A file that was written."""

    part: str
    file: FileHash
    rows: int
    data_hash: str
    """Hash over the ids, messages and answers."""


@dataclass(frozen=True, slots=True)
class Division:
    """Division of one set into parts, in the order of the questions' hashes."""

    of: str
    seed: int
    distinct: int
    repeats: int
    """Rows left out because an earlier one asks the same."""
    unused: int
    """Questions that no part took."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Record of a build."""

    version: str
    sources: tuple[Source, ...]
    division: Division | None
    outputs: tuple[Output, ...]
    overlap: tuple[Overlap, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a split. Example: Part("test", 500); size None takes all that is left."""

    name: str
    size: int | None


def build(loaded: Sequence[Loaded], folder: Path, format: Format = "jsonl", names: Names | None = None) -> Manifest:
    """Write each set as NAME.jsonl or NAME.parquet, and the manifest.

    Raises DataError if an evaluation set has a question of a train set, or the folder holds files of these names.
    """
    for train in (one for one in loaded if one.set.side == "train"):
        for held in (one for one in loaded if one.set.side == "evaluation"):
            refuse_overlap(train.prompts, held.prompts, f"{train.set.where} and {held.set.where}")
    parts = [(one.set.name, one.prompts) for one in loaded]
    outputs = _write_parts(parts, folder, format, names or Names())
    return _finish(Manifest(__version__, _sources(loaded), None, outputs, overlaps(loaded)), folder)


def _require_questions(parts: Sequence[Part], different: int, where: str) -> None:
    """Raise DataError unless each part gets a question, and only the last one takes what remains."""
    wanted, rest = sum(part.size or 0 for part in parts), parts[-1]
    if any(part.size is None for part in parts[:-1]):
        what = "a part without a size takes all remaining questions, so it must be the last"
        raise DataError(what, where=where, fix="put the part without a size last")
    if wanted > different:
        what = f"the parts ask for {wanted} questions, but there are only {different} different ones"
        raise DataError(what, where=where, fix="give the parts smaller sizes")
    if rest.size is None and wanted == different:
        what = f"the parts ask for all {different} different questions, so none remains for {rest.name}"
        raise DataError(what, where=where, fix=f"give the parts smaller sizes, or leave out {rest.name}=rest")
    if empty := [part.name for part in parts if part.size == 0]:
        raise DataError(f"the part {empty[0]} would have no question", where=where, fix="give it a size above 0")


def split_set(
    loaded: Loaded,
    parts: Sequence[Part],
    folder: Path,
    seed: int = 0,
    format: Format = "jsonl",
    names: Names | None = None,
) -> Manifest:
    """Divide a set into parts without a question in common, and write them with the manifest.

    Questions are dealt to the parts in the order in which the parts are given, by a hash of the question and the seed:
    neither the order of the rows nor the size of a later part changes what an earlier part gets. If several rows ask the
    same, only the first is used. Raises DataError if there are too few questions.
    """
    first: dict[bytes, Prompt] = {}
    for prompt in loaded.prompts:
        first.setdefault(question_digest(prompt.messages), prompt)
    order = sorted(first)  # with seed 0, in the order of `data.split.split`, by which a task holds rows out
    if seed:
        salt = (seed % 2**64).to_bytes(8, "big")
        order.sort(key=lambda digest: hashlib.sha256(salt + digest).digest())
    _require_questions(parts, len(order), loaded.set.where)
    made: list[tuple[str, tuple[Prompt, ...]]] = []
    start = 0
    for part in parts:
        end = len(order) if part.size is None else start + part.size
        made.append((part.name, tuple(first[digest] for digest in order[start:end])))
        start = end
    division = Division(loaded.set.name, seed, len(order), len(loaded.prompts) - len(order), len(order) - start)
    outputs = _write_parts(made, folder, format, names or Names())
    found = tuple(measure(*made[-1], *other) for other in made[:-1])
    return _finish(Manifest(__version__, _sources([loaded]), division, outputs, found), folder)


def _sources(loaded: Sequence[Loaded]) -> tuple[Source, ...]:
    return tuple(source_of(one.set.name, one.rows) for one in loaded)


def source_of(name: str, rows: Rows) -> Source:
    """Return the source of some rows: their files with SHA-256, and the counts of reading them."""
    located = rows.located
    files, labels = located.files, located.labels
    if located.generator:
        file = Path(located.generator.rpartition(":")[0]).expanduser()
        files, labels = (file,), (str(file),)
    hashes = tuple(_hash(file, label) for file, label in zip(files, labels, strict=True))
    settings = rows.data.model_dump(mode="json", exclude_none=True)
    return Source(name, rows.origin, located.commit, hashes, settings, rows.reading, rows.content_hash)


def _hash(path: Path, label: str) -> FileHash:
    return FileHash(label, path.stat().st_size, sha256_of(path))


def _finish(manifest: Manifest, folder: Path) -> Manifest:
    tree = {"ngram": NGRAM, **asdict(manifest)}
    write_atomic(folder / MANIFEST, json.dumps(tree, indent=1, ensure_ascii=False, default=str) + "\n")
    return manifest


def _write_parts(
    parts: Sequence[tuple[str, Sequence[Prompt]]], folder: Path, format: Format, names: Names
) -> tuple[Output, ...]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the output folder cannot be made: {error.strerror}",
            where=str(folder),
            fix="give --out a folder, new or empty, that you may write",
        ) from error
    paths = [folder / f"{name}.{format}" for name, _ in parts]
    if there := next((path for path in (*paths, folder / MANIFEST) if path.exists()), None):
        raise DataError(
            "this output file exists already", where=str(there), fix="give another folder, or remove the file"
        )
    with ExitStack() as all_or_none:
        for path, (_, prompts) in zip(paths, parts, strict=True):
            temporary = all_or_none.enter_context(atomic_path(path))
            if format == "jsonl":
                _write_jsonl(temporary, prompts, names)
            else:
                _write_parquet(temporary, prompts, names, where=str(path))
    made = zip(paths, parts, strict=True)
    return tuple(Output(name, _hash(path, path.name), len(rows), data_hash(rows)) for path, (name, rows) in made)


def record_of(prompt: Prompt, names: Names, *, as_text: bool) -> dict[str, object]:
    """Return a prompt as a row, a lone user turn as text if `as_text`. Raises DataError if a column has one of the names."""
    question = prompt.messages[0]["content"] if as_text and _lone(prompt) else [dict(turn) for turn in prompt.messages]
    record: dict[str, object] = {
        names.id: prompt.id.partition("/")[2],
        names.prompt: question,
        names.answer: prompt.answer,
    }
    if clash := next((name for name in prompt.data if name in record), None):
        raise DataError(
            f"two columns would be called {clash!r}: a kept one, and that of the question, answer or id",
            where=prompt.id,
            fix=("set `id` to this column if its values are unique, or " if clash == names.id else "")
            + "set `keep` to the columns that the grader needs, without this one",
        )
    tools = {TOOLS: prompt.tools} if prompt.tools else {}
    return record | {name: _plain(value) for name, value in prompt.data.items()} | tools


def _lone(prompt: Prompt) -> bool:
    return len(prompt.messages) == 1 and prompt.messages[0]["role"] == "user"


def _plain(value: object) -> object:
    """Return JSON data: a number that is not finite becomes null, a value that JSON lacks becomes text."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)


def _write_jsonl(path: Path, prompts: Sequence[Prompt], names: Names) -> None:
    # backslashreplace: a lone surrogate becomes the escape that JSON has for it
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for prompt in prompts:
            file.write(json.dumps(record_of(prompt, names, as_text=True), ensure_ascii=False) + "\n")


def _write_parquet(path: Path, prompts: Sequence[Prompt], names: Names, *, where: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    as_text = all(map(_lone, prompts))  # a column has one type
    try:
        records = [record_of(prompt, names, as_text=as_text) for prompt in prompts]
        columns = dict.fromkeys(name for record in records for name in record)  # pyarrow takes those of the first row
        table = pa.Table.from_pylist([columns | record for record in records])
        pq.write_table(table, path)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"a column has values that Parquet cannot hold, or of several types: {reason}",
            where=where,
            fix="write jsonl, which can hold them: --format jsonl",
        ) from error
