"""metrics.jsonl and events.jsonl: written by one process, appended to by the next attempt, read by everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from lockstep.errors import RunDirectoryError
from lockstep.text import hide_values
from lockstep.track.files import Closing
from lockstep.track.jsonl import JsonlFile, Prefix, number, read_jsonl, strict
from lockstep.track.rollouts import RolloutRow, read_rollouts, write_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.types import Probe, Proof

__all__ = [
    "Event", "RolloutRow", "RunWriter", "StepRecord", "proof_from_json", "read_events", "read_metrics", "read_rollouts",
    "write_rollouts",
]  # fmt: skip


def _timed(text: str) -> str:
    """Raises ValueError for what is no time of a time zone."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("the time has no time zone")
    return text


def _read_number(value: object) -> float:
    try:
        return number(value)
    except (TypeError, OverflowError) as error:  # pydantic passes on ValueError alone
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The numbers of one step. Step 0 is the base model: evaluated, not trained."""

    step: int
    attempt: int
    time: Annotated[str, AfterValidator(_timed)]
    """UTC, with milliseconds."""
    metrics: dict[str, Annotated[float, BeforeValidator(_read_number)]]
    """By the names of `lockstep metrics list`."""
    proof: dict[str, Any] | None = None
    """lockstep.types.Proof in terms of JSON; `proof_from_json` reads it back."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. Example: Event("…", 2, "lock_taken_over", None, "process 4711 on node7 died", {})"""

    __pydantic_config__ = ConfigDict(extra="forbid")

    time: str
    attempt: int
    kind: str
    step: int | None
    message: str
    facts: dict[str, Any] = field(default_factory=dict)


T = TypeVar("T")
_STEP, _EVENT = TypeAdapter(StepRecord), TypeAdapter(Event)


class RunWriter(Closing):
    """Appends to the metrics and events of a run whose lock this process holds.

    Opening it logs what the last process left undone: `lock_taken_over`, `torn_line`.
    Raises RunDirectoryError if the run was opened for reading.
    """

    def __init__(self, run: RunDirectory) -> None:
        run.require_writable()
        self._attempt = run.attempt
        self._metrics = JsonlFile(run.metrics_path)
        self._events = JsonlFile(run.events_path)
        if run.taken_from is not None:
            how = "which is gone" if run.taken_from.alive is False else "which this host cannot look at"
            self.event("lock_taken_over", f"from {run.taken_from}, {how}", holder=run.taken_from)
        for file in (self._metrics, self._events):
            if file.torn:
                name = file.path.name
                message = f"the last line of {name} was cut off; its {file.torn} bytes are in {name}.torn"
                self.event("torn_line", message, file=name, bytes=file.torn)

    def step(self, step: int, metrics: Mapping[str, float], proof: Proof | None = None) -> StepRecord:
        """Append one row and return it; it is on disk then. Raises StorageError; TypeError for a value that is no number."""
        values = {name: _as_float(name, value) for name, value in metrics.items()}
        shown = None if proof is None else {**strict(proof), "passed": proof.passed}
        record = StepRecord(step, self._attempt, _now(), values, shown)
        self._metrics.append(asdict(record))
        return record

    @property
    def rows(self) -> Prefix:
        """All rows so far, for a checkpoint to remember."""
        return self._metrics.prefix

    def event(self, kind: str, message: str = "", *, step: int | None = None, **facts: object) -> Event:
        """Append one event; `facts` are whatever JSON can hold. Raises StorageError, TypeError."""
        event = Event(_now(), self._attempt, kind, step, hide_values(message), strict(facts))
        self._events.append(asdict(event))
        return event

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def read_metrics(run: RunDirectory) -> list[StepRecord]:
    """Return one record a step, in order of steps. Where attempts overlap the last one wins: see `lineage`.

    Raises RunDirectoryError, naming the line, if the file was damaged elsewhere than at its end.
    """
    return lineage(_read(run.metrics_path, _step, "row of metrics"))


def lineage(rows: Iterable[StepRecord]) -> list[StepRecord]:
    """Return the rows of the weights that the run ended with.

    An attempt that starts at step s continues the weights of step s - 1, so rows of earlier attempts from s on belong
    to weights that no longer exist: they are left out, even if this attempt has not come as far again. Rows of one
    attempt with the same step are one row.
    """
    by_attempt: dict[int, dict[int, StepRecord]] = {}
    for row in rows:
        steps = by_attempt.setdefault(row.attempt, {})
        before = steps.get(row.step)
        steps[row.step] = row if before is None else _merge(before, row)
    kept: dict[int, StepRecord] = {}
    for _, steps in sorted(by_attempt.items()):
        start = min(steps)
        kept = {step: row for step, row in kept.items() if step < start} | steps
    return [kept[step] for step in sorted(kept)]


def read_events(run: RunDirectory) -> list[Event]:
    """Return all events of all attempts, as they happened. Raises RunDirectoryError as `read_metrics`."""
    return _read(run.events_path, _EVENT.validate_python, "record of an event")


def proof_from_json(row: Mapping[str, Any]) -> Proof:
    """Return the proof as a record again. Raises KeyError or TypeError if the row is none."""
    probe = row["probe"]
    kept = ("mean", "p99", "max", "tolerance")
    return Proof(
        version=int(row["version"]),
        fingerprint=str(row["fingerprint"]),
        tensors=int(row["tensors"]),
        bytes=int(row["bytes"]),
        mismatched=tuple(row["mismatched"]),
        changed=int(row["changed"]),
        probe=None if probe is None else Probe(int(probe["tokens"]), *(number(probe[key]) for key in kept)),
        seconds=number(row["seconds"]),
    )


def _read(path: Path, read: Callable[[object], T], noun: str) -> list[T]:
    """Read each line of a file. Raises RunDirectoryError, naming the line."""
    found = []
    for index, row in enumerate(read_jsonl(path), start=1):
        try:
            found.append(read(row))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = repr(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False, include_context=False)[0]
                reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise RunDirectoryError(
                f"the line is not a {noun}: {reason}",
                where=f"{path}:{index}",
                fix="restore the file from a backup; without one, start a new run",
            ) from error
    return found


def _step(row: object) -> StepRecord:
    record = _STEP.validate_python(row)
    if record.proof is not None:
        proof_from_json(record.proof)
    return record


def _merge(before: StepRecord, after: StepRecord) -> StepRecord:
    proof = before.proof if after.proof is None else after.proof
    return StepRecord(after.step, after.attempt, after.time, {**before.metrics, **after.metrics}, proof)


def _as_float(name: str, value: object) -> float:
    if isinstance(value, str):
        raise TypeError(f"metric {name} is text, not a number: {value!r}")
    return float(value)  # type: ignore[arg-type]  # numbers of numpy and torch convert; anything else raises TypeError


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
