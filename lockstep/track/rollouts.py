"""rollouts/step_000012.parquet: every graded rollout of a step, one per row, readable by any parquet tool."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import RunDirectoryError
from lockstep.track.files import atomic_path, open_plain
from lockstep.track.jsonl import dumps, number, parse_json
from lockstep.track.rundir import RunDirectory
from lockstep.types import Branch, Group, Message, Rollout, TokenIds

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_LISTS = ("prompt_ids", "ids", "logprobs", "trained")
FACTS = "facts"
"""Name in the column `metrics` under which a grader's texts are stored."""
LEARNED = ("learner_logprobs", "entropies")
LATER = (*LEARNED, "branches", "tools")
"""Columns that older runs do not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """The learner's numbers for the trained tokens of a reply, in order, before the step's first update."""

    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    """In nats, at the sampling temperature."""


@dataclass(frozen=True, slots=True)
class StoredBranch(Branch):
    """A further row of an episode as stored, with the learner's numbers as in RolloutRow."""

    learner_logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One graded completion as stored. Lists are per response token."""

    prompt_id: str
    task: str
    messages: tuple[Message, ...]
    answer: str
    sample: int
    """Index within the group."""
    prompt_ids: tuple[int, ...]
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Stored as float32, the precision in which engines report them."""
    trained: tuple[bool, ...]
    finish: str
    version: int
    reward: float | None
    """None: could not be scored, `error` says why."""
    error: str | None
    metrics: dict[str, float]
    facts: dict[str, str]
    """Texts that the grader named."""
    extracted: str | None
    method: str
    advantage: float
    branches: tuple[StoredBranch, ...] = ()
    """Further rows of the episode, where its program rewrote or forked its history."""
    learner_logprobs: tuple[float, ...] = ()
    """The learner's, of the trained tokens alone. Empty if it did not process the reply, or track.tokens is off."""
    entropies: tuple[float, ...] = ()
    """Entropies of the learner's distributions, stored as float16, of the same tokens."""
    tools: str = ""
    """Functions that the prompt shows, a JSON list of schemas."""

    @property
    def rows(self) -> tuple[RolloutRow | StoredBranch, ...]:
        """All rows of the episode."""
        return (self, *self.branches)

    @property
    def right(self) -> bool | None:
        """True if the reply is correct: its `correct` if there is one, else a reward of at least 1. None: unscored."""
        if self.reward is None:
            return None
        return self.metrics.get("correct", self.reward) >= 1


def rollout_path(run: RunDirectory, step: int) -> Path:
    """Example: runs/a/rollouts/step_000012.parquet"""
    return run.rollouts_path / f"step_{step:06d}.parquet"


def rollout_steps(run: RunDirectory) -> list[int]:
    """Return the steps whose rollouts are stored, in order."""
    names = [re.fullmatch(r"step_(\d+)\.parquet", path.name) for path in run.rollouts_path.glob("step_*.parquet")]
    return sorted(int(name.group(1)) for name in names if name is not None)


def write_rollouts(
    run: RunDirectory,
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    learned: Mapping[TokenIds, Learned] | None = None,
) -> Path:
    """Store a step's rollouts at once, replacing what an earlier attempt stored for it.

    `advantages[g][i]` belongs to `groups[g].rollouts[i]`; raises ValueError if the shapes differ. `learned` holds the learner's
    numbers by all ids of a row, prompt and reply.
    Lone surrogates, which parquet cannot hold, are written as \\udXXX escapes; the ids are unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    run.require_writable()
    rows: list[dict[str, object]] = []
    for group, values in zip(groups, advantages, strict=True):
        rows += [_row(rollout, value, learned or {}) for rollout, value in zip(group.rollouts, values, strict=True)]
    table = pa.Table.from_pylist(rows, schema=_schema())
    path = rollout_path(run, step)
    path.parent.mkdir(exist_ok=True)
    with atomic_path(path) as temporary:
        pq.write_table(  # dictionaries of numbers that hardly repeat take most of the time, and space besides
            table, temporary, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
    return path


def read_rollouts(run: RunDirectory, step: int, wanted: Sequence[int] | None = None) -> list[RolloutRow]:
    """Return the rollouts of a step, groups and samples in order; `wanted`: those with these positions in its file.

    Raises RunDirectoryError if not stored, or damaged.
    """
    table = read_table(run, step)
    if wanted and max(wanted) >= len(table):
        what = f"step {step} has {len(table)} rollouts, and none of number {max(wanted)}; they are counted from 0"
        raise RunDirectoryError(what, where=str(run.path), fix="choose a smaller number")
    with _readable(rollout_path(run, step)):
        return [_from_row(row) for row in (table if wanted is None else table.take(wanted)).to_pylist()]


def read_table(run: RunDirectory, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a step's rollouts as a table, or some of its columns. Raises as `read_rollouts`.

    Each page has a checksum, which is verified: a flipped bit would else be another reward or token that still reads well.
    """
    import pyarrow.parquet as pq

    path = rollout_path(run, step)
    if not path.exists():
        steps = rollout_steps(run)
        fix = "wait for the run's first step, or choose another run"
        if steps:
            fix = f"choose one of the {len(steps)} stored steps, {steps[0]} to {steps[-1]}"
        raise RunDirectoryError(f"no rollouts of step {step} are stored", where=str(run.path), fix=fix)
    with _readable(path), os.fdopen(open_plain(path), "rb") as file:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        missing = [name for name in LATER if name not in parquet.schema_arrow.names]
        if parquet.schema_arrow.remove_metadata() != _schema(missing):
            names = ", ".join(parquet.schema_arrow.names)[:200]
            raise ValueError(f"its columns are not those of rollouts: {names}")
        return parquet.read(columns=None if columns is None else list(columns))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise RunDirectoryError, which names the file, for whatever a damaged one raises."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RunDirectoryError(
            f"cannot be read: {reason}",
            where=str(path),
            fix="restore the file from a backup, or remove it to go on without it",
        ) from error


def _row(rollout: Rollout, advantage: float, learned: Mapping[TokenIds, Learned]) -> dict[str, object]:
    grade = rollout.grade

    def known(row: Rollout | Branch) -> dict[str, object]:
        found = learned.get(row.prompt_ids + row.ids)
        if found is None:
            return {"learner_logprobs": (), "entropies": ()}
        return {"learner_logprobs": found.logprobs, "entropies": found.entropies.astype("float16")}

    facts = {FACTS: {name: storable(text) for name, text in grade.facts.items()}} if grade.facts else {}
    return {
        "prompt_id": storable(rollout.prompt.id),
        "task": storable(rollout.prompt.task),
        "messages": dumps(rollout.prompt.messages),
        "tools": storable(rollout.prompt.tools),
        "answer": storable(rollout.prompt.answer),
        "sample": rollout.sample,
        "prompt_ids": rollout.prompt_ids,
        "text": storable(rollout.text),
        "ids": rollout.ids,
        "logprobs": rollout.logprobs,
        "trained": rollout.trained,
        "finish": rollout.finish.value,
        "version": rollout.version,
        "reward": grade.reward,
        "error": None if grade.error is None else storable(grade.error),
        "metrics": dumps({name: float(value) for name, value in grade.metrics.items()} | facts),
        "extracted": None if grade.extracted is None else storable(grade.extracted),
        "method": storable(grade.method),
        "advantage": float(advantage),
        "branches": [{**asdict(one), "text": storable(one.text), **known(one)} for one in rollout.branches],
        **known(rollout),
    }


def _from_row(row: Mapping[str, Any]) -> RolloutRow:
    lists: dict[str, Any] = {name: tuple(row[name]) for name in (*_LISTS, *LEARNED) if name in row}
    named = parse_json(row["metrics"])
    facts = {name: str(text) for name, text in named.pop(FACTS).items()} if isinstance(named.get(FACTS), dict) else {}
    metrics = {name: number(value) for name, value in named.items()}
    messages = tuple(Message(role=str(one["role"]), content=str(one["content"])) for one in parse_json(row["messages"]))
    stored: Any = StoredBranch
    branches = tuple(
        stored(text=str(one["text"]), **{name: tuple(one[name]) for name in (*_LISTS, *LEARNED)})
        for one in row.get("branches") or ()
    )
    return RolloutRow(
        **{**row, **lists, "messages": messages, "metrics": metrics, "facts": facts, "branches": branches}
    )


def _schema(without: Sequence[str] = ()) -> pa.Schema:
    """Return the columns; `without` those that older runs do not have."""
    import pyarrow as pa

    text, int32, int64 = pa.string(), pa.int32(), pa.int64()
    lists = {
        "prompt_ids": pa.list_(int64), "ids": pa.list_(int64), "logprobs": pa.list_(pa.float32()),
        "trained": pa.list_(pa.bool_()),
    }  # fmt: skip
    learned = {"learner_logprobs": pa.list_(pa.float32()), "entropies": pa.list_(pa.float16())}
    types = {
        "prompt_id": text, "task": text, "messages": text, "tools": text, "answer": text, "sample": int32, "text": text, **lists,
        "finish": text, "version": int64, "reward": pa.float64(), "error": text, "metrics": text, "extracted": text,
        "method": text, "advantage": pa.float64(),
        "branches": pa.list_(pa.struct(list((lists | {"text": text} | learned).items()))), **learned,
    }  # fmt: skip
    return pa.schema([(name, kind) for name, kind in types.items() if name not in without])


def storable(text: str) -> str:
    """Write lone surrogates, which parquet cannot hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
