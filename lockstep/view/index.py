"""Holds the rollouts of all steps in a table in memory, so that filters answer at once. New steps of a training run are added.

The parquet files are read by `track.rollouts`, which follows no link and verifies checksums. Token ids and log-probabilities
stay in the files: the page asks for those of one rollout or group at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.errors import RunDirectoryError
from lockstep.track.jsonl import number, parse_json
from lockstep.track.rollouts import read_table, rollout_path, rollout_steps, storable
from lockstep.track.rundir import RunDirectory
from lockstep.view.query import ORDERS, Query

COLUMNS = (
    "prompt_id", "task", "messages", "answer", "sample", "text", "trained", "finish", "version", "reward", "error", "metrics",
    "extracted", "method", "advantage", "branches.list.element.trained", "branches.list.element.text",
)  # fmt: skip
BRANCHES = pa.list_(pa.struct([("trained", pa.list_(pa.bool_())), ("text", pa.string())]))
"""Parts of further branches that are read."""
AT_ONCE = 64
"""Files that are taken in together; the newest are taken in first and alone, so that the page has something to show."""

TABLE = """
CREATE TABLE rollouts (
  id BIGINT, run INTEGER, step INTEGER, row INTEGER, prompt_id VARCHAR, task VARCHAR, question VARCHAR, answer VARCHAR,
  sample INTEGER, reply VARCHAR, searched VARCHAR, length INTEGER, finish VARCHAR, version BIGINT, reward DOUBLE,
  error VARCHAR, is_right BOOLEAN, extracted VARCHAR, method VARCHAR, advantage DOUBLE, branches INTEGER
)
"""
INSERT = """
INSERT INTO rollouts
SELECT (run::BIGINT << 52) + (step::BIGINT << 21) + row, run, step, row, prompt_id, task, question, answer, sample, text,
  lower(concat_ws(chr(10), text, question, answer, array_to_string([one.text for one in branches], chr(10)))),
  len(trained) + len(flatten([one.trained for one in branches])), finish, version, reward, error, is_right, extracted,
  method, advantage, 1 + len(branches)
FROM batch
"""
LISTED = """
step, row, prompt_id, sample, left(question, 300) AS question, left(reply, 300) AS reply, length, finish, reward, is_right,
extracted, advantage, branches
"""
SETTLED_NS = 2_000_000_000
"""Age of a folder's last change from which on another one must have another time, on any file system."""
CACHED = 8
"""Answers to filters that are kept, so that the next page of a list costs nothing."""


@dataclass(slots=True)
class _Source:
    """A run and the files of it that are in the table."""

    run: RunDirectory
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step to the time and size of its file."""
    failed: dict[int, str] = field(default_factory=dict)
    stored: int = 0
    seen: int = 0
    """Time of the last change of the folder that was looked at: files appear and are replaced by being renamed into it."""


class Index:
    """The table of one or more runs. `refresh` reads what is new; queries may come from any thread."""

    def __init__(self, runs: Sequence[RunDirectory]) -> None:
        self._sources = [_Source(run) for run in runs]
        config: dict[str, Any] = {"enable_external_access": False, "python_enable_replacements": False}
        self._database = duckdb.connect(":memory:", config=config)
        self._database.execute(TABLE)
        self._writing = threading.Lock()
        self._generation = 0
        self._found: dict[tuple[object, ...], pa.Table] = {}

    def refresh(self) -> bool:
        """Take in files that are new or have changed, newest steps first. Returns whether there were any."""
        with self._writing:
            found = [self._refresh(run, source) for run, source in enumerate(self._sources)]
        return any(found)

    def close(self) -> None:
        self._database.close()

    def state(self, run: int) -> dict[str, object]:
        """Return the number of stored steps, of those in the table, and the files that cannot be read."""
        source = self._sources[run]
        return {"stored": source.stored, "read": len(source.taken), "notes": list(source.failed.values())}

    def rows(self, sql: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        """Return the rows of a query, each by the names of its columns."""
        cursor = self._database.cursor().execute(sql, list(values))
        names = [one[0] for one in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def browse(self, query: Query, newest: int | None) -> dict[str, object]:
        """Return the counts of all rows that fit, and one page of them."""
        found = self._matching(query, newest)
        right, places = found["is_right"], found["id"].slice(query.offset, query.limit).to_pylist()
        page = self.rows(f"SELECT {LISTED}, id FROM rollouts WHERE id IN (SELECT unnest(?))", [places])
        return {
            "total": len(found), "right": pc.sum(right).as_py() or 0, "unscored": right.null_count,
            "wrong": len(found) - right.null_count - (pc.sum(right).as_py() or 0),
            "reward": pc.mean(found["reward"]).as_py(), "length": pc.mean(found["length"]).as_py(),
            "rows": sorted(page, key=lambda row: places.index(row["id"])),
        }  # fmt: skip

    def _matching(self, query: Query, newest: int | None) -> pa.Table:
        """Return the rows that fit, in order, without their texts; the texts of one page alone are read."""
        where, values = query.where(newest)
        key = (self._generation, where, tuple(values), query.order)
        if key not in self._found:
            sql = f"SELECT id, is_right, reward, length FROM rollouts WHERE {where} ORDER BY {ORDERS[query.order]}"
            table = self._database.cursor().sql(sql, params=values).to_arrow_table()
            self._found = dict([*self._found.items(), (key, table)][-CACHED:])
        return self._found[key]

    def _refresh(self, run: int, source: _Source) -> bool:
        if (seen := _changed(source.run.rollouts_path)) == source.seen != 0 and not source.failed:
            return False
        steps = {step: _signature(source.run, step) for step in rollout_steps(source.run)}
        source.stored, source.seen = len(steps), seen
        changed = [step for step in sorted(steps, reverse=True) if source.taken.get(step) != steps[step]]
        gone = [step for step in source.taken if step not in steps]
        self._remove(run, source, [*gone, *(step for step in changed if step in source.taken)])
        for batch in (changed[:1], *(changed[i : i + AT_ONCE] for i in range(1, len(changed), AT_ONCE))):
            self._take(run, source, batch, steps)
        self._generation += bool(changed or gone)
        return bool(changed or gone)

    def _remove(self, run: int, source: _Source, steps: Sequence[int]) -> None:
        if steps:
            self._database.execute("DELETE FROM rollouts WHERE run = ? AND list_contains(?, step)", [run, list(steps)])
        for step in steps:
            del source.taken[step]
            source.failed.pop(step, None)

    def _take(self, run: int, source: _Source, steps: Sequence[int], signatures: dict[int, tuple[int, int]]) -> None:
        tables = []
        for step in steps:
            try:
                tables.append(_placed(read_table(source.run, step, COLUMNS), run, step, rollout_path(source.run, step)))
                source.failed.pop(step, None)
            except RunDirectoryError as error:
                source.failed[step] = str(error)
        if tables:
            batch = pa.concat_tables(tables)
            cursor = self._database.cursor()
            cursor.register("batch", batch)
            cursor.execute(INSERT)
            cursor.unregister("batch")
            self._generation += 1
        source.taken |= {step: signatures[step] for step in steps}


def _placed(table: pa.Table, run: int, step: int, path: Path) -> pa.Table:
    """Add the columns run, step, row, question and is_right, and drop the JSON. Raises RunDirectoryError if it is none."""
    count = len(table)
    try:
        questions = pa.array(map(_question, table["messages"].to_pylist()), pa.string())
        right = pa.array(map(_right, table["reward"].to_pylist(), table["metrics"].to_pylist()), pa.bool_())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunDirectoryError(f"cannot be read: {error}", where=str(path)) from error
    if "branches" not in table.column_names:  # a run of an older version
        table = table.append_column("branches", pa.array([[]] * count, BRANCHES))
    for name, values in (("run", [run] * count), ("step", [step] * count), ("row", range(count))):
        table = table.append_column(name, pa.array(values, pa.int32()))
    return table.drop(["messages", "metrics"]).append_column("question", questions).append_column("is_right", right)


@lru_cache(maxsize=1024)  # the samples of a group have the same
def _question(messages: str) -> str:
    return storable("".join(message["content"] for message in parse_json(messages)[-1:]))


def _right(reward: float | None, metrics: str) -> bool | None:
    """Judge as RolloutRow.right."""
    return None if reward is None else number(parse_json(metrics).get("correct", reward)) >= 1


def _changed(folder: Path) -> int:
    """Return the time of a folder's last change; 0 if there is none, or if it is so new that it may change unnoticed."""
    try:
        changed = folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
    return changed if time.time_ns() - changed > SETTLED_NS else 0


def _signature(run: RunDirectory, step: int) -> tuple[int, int]:
    try:
        facts = os.lstat(rollout_path(run, step))
    except FileNotFoundError:  # replaced by an attempt at this moment
        return 0, 0
    return facts.st_mtime_ns, facts.st_size
