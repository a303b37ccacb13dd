"""Sends a run's metrics to trackers. Each tracker has its own thread, and neither stops the run nor slows it.

metrics.jsonl has everything. A tracker that fails or hangs is reported once and then left out. The steps after the last one
that it holds are sent when the run is resumed, or by `lockstep track sync`.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from lockstep.config.records import Mode, Sink
from lockstep.config.schema import Track
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.text import did_you_mean, hide_values, reason_of
from lockstep.track.facts import SECRET_TEXT
from lockstep.track.files import write_atomic
from lockstep.track.jsonl import dumps, read_json
from lockstep.track.rundir import RunDirectory
from lockstep.track.trackers import BUILT_IN, Sample, TrackedRun
from lockstep.track.writer import read_metrics
from lockstep.types import Metrics, Tracker
from lockstep.user_code import load_object

OnFailure: TypeAlias = Callable[[str, Exception], None]
Recipe: TypeAlias = Mapping[str, Any]
Work: TypeAlias = Callable[[Any], None]

GROUP = "lockstep.trackers"
"""Group of entry points in which packages register trackers."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record of a tracker, in trackers/<name>.json."""

    id: str
    sent: dict[str, int] = field(default_factory=dict)
    """Last step that it took, by mode."""
    failed: str = ""
    """Reason why it was left behind, "" if it was not."""


def build_sinks(
    track: Track, run: RunDirectory, run_name: str, recipe: Recipe, *, on_failure: OnFailure, start: int = 0
) -> list[Sender]:
    """Open the trackers of `track.sinks`. `on_failure` hears, once for each, of one that failed. `start`: trained steps so far.

    Raises ConfigError, with the pip line, for packages that are not installed, and for a tracker that cannot be opened when a run
    starts; a run that is resumed goes on without it.
    """
    run.require_writable()
    check_installed(track)
    senders: list[Sender] = []
    for sink in track.sinks:
        if sink.mode == "off":
            continue
        sender = Sender(sink, run, told(track, sink, run, run_name, recipe), track.timeout_s, on_failure)
        senders.append(sender)
        error = sender.open(start)
        if error is not None and run.attempt == 1 and not isinstance(error, TimeoutError):
            for one in senders:
                one.close()
            mistake = f"track.sinks: {sink.name} cannot be set up: {reason(error)}"
            raise ConfigError([mistake], fix=f"correct its settings, or remove {sink.name} from track.sinks") from error
    return senders


def check_installed(track: Track) -> None:
    """Raise ConfigError for trackers that are not there. To be asked before a run is created: it runs a user's file."""
    mistakes = [f"track.sinks: {why}" for sink in track.sinks if sink.mode != "off" and (why := missing(sink.name))]
    if mistakes:
        raise ConfigError(mistakes, fix="pip install 'lockstep-rl[trackers]', or remove the tracker from track.sinks")


def missing(name: str) -> str:
    """Say why there is no tracker of this name; "" if there is one."""
    if name in BUILT_IN:
        return "" if find_spec(name) else f"{name} is not installed"
    if ".py:" in name:
        load_object(name, ConfigError)
        return ""
    others = [one.name for one in entry_points(group=GROUP)]
    hint = did_you_mean(name, [*BUILT_IN, *others], f"no package registers it as an entry point {GROUP}", cutoff=0.5)
    return "" if name in others else f"there is no tracker {name}; {hint}"


def maker(name: str) -> Callable[[TrackedRun], Any]:
    """Return the class of a tracker: a built-in one, one of a package's, or one in a user's file."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ".py:" in name:
        found: Any = load_object(name, ConfigError)
        return found  # type: ignore[no-any-return]
    (one,) = entry_points(group=GROUP, name=name)
    return one.load()  # type: ignore[no-any-return]


def told(
    track: Track, sink: Sink, run: RunDirectory, name: str, recipe: Recipe, mode: Mode | None = None
) -> TrackedRun:
    """Return what the tracker is told of the run."""
    return TrackedRun(
        name=name,
        id=record_of(run.path, sink.name).id,
        folder=run.path,
        project=track.project,
        group=track.group,
        job_type=track.job_type,
        tags=track.tags,
        recipe=recipe,
        mode=mode or sink.mode,
        resumed=run.attempt > 1,
        settings=sink.settings,
    )


def reason(error: Exception) -> str:
    """Return an error in one line, without secrets."""
    return SECRET_TEXT.sub("***", hide_values(reason_of(error, 2000)))[:500]


class Sender:
    """One tracker in its thread. `log`, `samples` and `artifact` return at once.

    Steps that the tracker holds already are not sent again.
    """

    def __init__(
        self, sink: Sink, run: RunDirectory, about: TrackedRun, timeout_s: float, on_failure: OnFailure
    ) -> None:
        self.name = sink.name
        self._run, self._about, self._timeout, self._on_failure = run, about, timeout_s, on_failure
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._busy: float | None = None
        """Time when the present piece of work began."""
        self._error: Exception | None = None
        self._on, self._opened = True, threading.Event()
        self._last, self._mode, self._rewrites = -1, "online", False
        self._record = record_of(run.path, sink.name)
        self._thread = threading.Thread(target=self._serve, name=f"tracker {self.name}", daemon=True)
        self.caught_up: list[int] = []
        """Steps that were sent from metrics.jsonl."""

    def open(self, start: int | None) -> Exception | None:
        """Open the tracker and send what it misses of the steps up to `start`, of all if None. Returns what went wrong."""
        if self._about.resumed:
            rows = [row for row in read_metrics(self._run) if start is None or row.step <= start]
            self._work.put(lambda tracker: self._catch_up(tracker, rows))
        self._thread.start()
        self._opened.wait(self._timeout)
        if not self._opened.is_set():
            self._error = TimeoutError(f"the tracker did not open within {self._timeout:g} s")
        error = self._error
        if error is not None and (self._run.attempt > 1 or isinstance(error, TimeoutError)):
            self._alive()
        elif error is not None:
            self._on = False
        return error

    def log(self, step: int, metrics: Metrics, *, more: bool = False) -> None:
        """Send a step's metrics; `more`: they add to a step that was sent."""
        copy = dict(metrics)
        self._put(lambda tracker: self._log(tracker, step, copy, more=more))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Send replies as text, if the tracker takes any."""
        self._put(lambda tracker: tracker.samples(step, samples) if hasattr(tracker, "samples") else None)

    def artifact(self, path: Path, name: str) -> None:
        """Send a folder, if the tracker takes files."""
        self._put(lambda tracker: tracker.artifact(path, name) if hasattr(tracker, "artifact") else None)

    def close(self) -> None:
        """Finish what waits, within the time that a tracker has in all."""
        self.wait(time.monotonic() + self._timeout)

    def wait(self, until: float = math.inf) -> None:
        """Finish what waits, however long it is, while each piece is done in its time."""
        if self._alive():
            self._work.put(None)
            while self._thread.is_alive() and self._alive() and time.monotonic() < until:
                self._thread.join(0.1)
            if self._thread.is_alive():
                self._error = self._error or TimeoutError(f"the tracker did not finish within {self._timeout:g} s")
            self._alive()
        self._on = False

    def _put(self, work: Work) -> None:
        if self._alive():
            self._work.put(work)

    def _alive(self) -> bool:
        """Return whether the tracker works; one that stopped working is reported here, by the run's own thread."""
        if self._on and self._error is None and self._busy and time.monotonic() - self._busy > self._timeout:
            self._error = TimeoutError(f"the tracker has not answered for {self._timeout:g} s")
        if self._on and self._error is not None:
            self._on = False
            self._remember(failed=reason(self._error))
            self._on_failure(self.name, self._error)
        return self._on

    def _serve(self) -> None:
        tracker: Any = None
        try:
            tracker = maker(self.name)(self._about)
            self._mode, self._rewrites = getattr(tracker, "mode", "online"), getattr(tracker, "rewrites", False)
            held = tracker.last_step() if hasattr(tracker, "last_step") else self._record.sent.get(self._mode, -1)
            self._last = held if self._about.resumed else -1
            self._opened.set()
            while self._error is None and (work := self._work.get()) is not None:
                self._busy = time.monotonic()
                work(tracker)
                self._busy = None
            if self._error is None:
                self._busy = time.monotonic()
                tracker.close()
        except Exception as error:  # a tracker may raise anything, and none of it is worth the run
            self._error = self._error or error
        finally:
            self._busy = None
            self._opened.set()

    def _log(self, tracker: Tracker, step: int, metrics: Metrics, *, more: bool = False) -> None:
        if step <= self._last and not more and not self._rewrites:
            return  # a resumed run makes steps again that the tracker holds
        tracker.log(step, metrics)
        if self._error is None:  # else it was left behind, and the run has reported that
            self._remember(sent={**self._record.sent, self._mode: step}, failed="")

    def _catch_up(self, tracker: Tracker, rows: Sequence[Any]) -> None:
        held = self._last
        for row in rows:
            if row.step > held:
                self._busy = time.monotonic()
                self._log(tracker, row.step, row.metrics)
                self.caught_up.append(row.step)

    def _remember(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        _write(self._run.path, self.name, self._record)


def record_of(run: Path, name: str) -> Record:
    """Return what the run remembers of a tracker; a new identity, stored at once, if it is nothing. Raises as `stored_record`."""
    record = stored_record(run, name)
    if record is None:
        record = Record(uuid.uuid4().hex[:12])
        _write(run, name, record)
    return record


def stored_record(run: Path, name: str) -> Record | None:
    """Return what the run remembers of a tracker, if anything. Raises RunDirectoryError for a file that is no such record."""
    path = _place(run, name)
    if not path.is_file():
        return None
    try:
        return TypeAdapter(Record).validate_python(read_json(path))
    except ValidationError as error:
        what = f"this is not a record of a tracker: {error.errors(include_url=False)[0]['msg']}"
        raise RunDirectoryError(what, where=str(path), fix="restore it from a copy, or remove it") from error


def _write(run: Path, name: str, record: Record) -> None:
    path = _place(run, name)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, dumps(asdict(record)) + "\n")


def _place(run: Path, name: str) -> Path:
    return run / "trackers" / f"{Path(name).name.replace(':', '.')}.json"
