"""rollouts/step_000012.parquet: every graded completion of a step, one a row, readable by any parquet tool."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import RunDirectoryError
from lockstep.track.files import atomic_path, open_plain
from lockstep.track.jsonl import dumps, number, parse_json
from lockstep.track.rundir import RunDirectory
from lockstep.types import Group, Message, Rollout

if TYPE_CHECKING:
    import pyarrow as pa


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
    extracted: str | None
    method: str
    advantage: float

    @property
    def right(self) -> bool | None:
        """Whether the reply is correct: its `correct` if there is one, else a reward of at least 1. None: unscored."""
        if self.reward is None:
            return None
        return self.metrics.get("correct", self.reward) >= 1


def rollout_path(run: RunDirectory, step: int) -> Path:
    """Example: runs/a/rollouts/step_000012.parquet"""
    return run.rollouts_path / f"step_{step:06d}.parquet"


def rollout_steps(run: RunDirectory) -> list[int]:
    """The steps whose rollouts are stored, in order."""
    names = [re.fullmatch(r"step_(\d+)\.parquet", path.name) for path in run.rollouts_path.glob("step_*.parquet")]
    return sorted(int(name.group(1)) for name in names if name is not None)


def write_rollouts(
    run: RunDirectory, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> Path:
    """Store a step's rollouts at once, replacing what an earlier attempt stored for it.

    `advantages[g][i]` belongs to `groups[g].rollouts[i]`; raises ValueError if the shapes differ.
    Lone surrogates, which parquet cannot hold, are written as \\udXXX escapes; the ids are unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    run.require_writable()
    rows: list[dict[str, object]] = []
    for group, values in zip(groups, advantages, strict=True):
        rows += [_row(rollout, value) for rollout, value in zip(group.rollouts, values, strict=True)]
    table = pa.Table.from_pylist(rows, schema=_schema())
    path = rollout_path(run, step)
    path.parent.mkdir(exist_ok=True)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
    return path


def read_rollouts(run: RunDirectory, step: int) -> list[RolloutRow]:
    """The rollouts of a step, groups and samples in order. Raises RunDirectoryError if not stored, or damaged.

    Each page has a checksum, which is verified: a flipped bit would else be another reward or token that still reads well.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = rollout_path(run, step)
    if not path.exists():
        steps = rollout_steps(run)
        fix = f"choose one of the {len(steps)} stored steps, {steps[0]} to {steps[-1]}" if steps else "none are stored"
        raise RunDirectoryError(f"no rollouts of step {step}", where=str(run.path), fix=fix)
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            table = pq.read_table(file, page_checksum_verification=True, partitioning=None)
        if table.schema.remove_metadata() != _schema():
            raise ValueError(f"its columns are not those of rollouts: {', '.join(table.schema.names)[:200]}")
        return [_from_row(row) for row in table.to_pylist()]
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RunDirectoryError(
            f"cannot be read: {reason}", where=str(path), fix="restore it from a copy, or remove it to do without it"
        ) from error


def _row(rollout: Rollout, advantage: float) -> dict[str, object]:
    grade = rollout.grade
    return {
        "prompt_id": _storable(rollout.prompt.id),
        "task": _storable(rollout.prompt.task),
        "messages": dumps(rollout.prompt.messages),
        "answer": _storable(rollout.prompt.answer),
        "sample": rollout.sample,
        "prompt_ids": rollout.prompt_ids,
        "text": _storable(rollout.text),
        "ids": rollout.ids,
        "logprobs": rollout.logprobs,
        "trained": rollout.trained,
        "finish": rollout.finish.value,
        "version": rollout.version,
        "reward": grade.reward,
        "error": None if grade.error is None else _storable(grade.error),
        "metrics": dumps({name: float(value) for name, value in grade.metrics.items()}),
        "extracted": None if grade.extracted is None else _storable(grade.extracted),
        "method": _storable(grade.method),
        "advantage": float(advantage),
    }


def _from_row(row: Mapping[str, Any]) -> RolloutRow:
    lists = {name: tuple(row[name]) for name in ("prompt_ids", "ids", "logprobs", "trained")}
    metrics = {name: number(value) for name, value in parse_json(row["metrics"]).items()}
    messages = tuple(Message(role=str(one["role"]), content=str(one["content"])) for one in parse_json(row["messages"]))
    return RolloutRow(**{**row, **lists, "messages": messages, "metrics": metrics})


def _schema() -> pa.Schema:
    import pyarrow as pa

    text, int32, int64 = pa.string(), pa.int32(), pa.int64()
    types = {
        "prompt_id": text, "task": text, "messages": text, "answer": text, "sample": int32, "text": text,
        "prompt_ids": pa.list_(int64), "ids": pa.list_(int64), "logprobs": pa.list_(pa.float32()),
        "trained": pa.list_(pa.bool_()),
        "finish": text, "version": int64, "reward": pa.float64(), "error": text, "metrics": text, "extracted": text,
        "method": text, "advantage": pa.float64(),
    }  # fmt: skip
    return pa.schema(list(types.items()))


def _storable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
