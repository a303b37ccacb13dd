"""The runs that the web page shows. Their files are read again when they have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.config.load import load
from lockstep.config.metric import Range
from lockstep.errors import LockstepError, RunDirectoryError
from lockstep.report.gather import NamedScore, read_scores
from lockstep.track.lock import read_holder
from lockstep.track.rundir import LOCK, RunDirectory
from lockstep.track.writer import Event, StepRecord, read_events, read_metrics
from lockstep.view.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of a run's files at one time."""

    signature: str
    records: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    scores: tuple[NamedScore, ...]
    notes: tuple[str, ...]

    @property
    def last(self) -> int | None:
        """The newest step; what lies beyond belongs to an attempt that the run did not continue."""
        return self.records[-1].step if self.records else None


class ViewedRun:
    """One run, with a short name that no other run on the page has."""

    def __init__(self, run: RunDirectory, label: str) -> None:
        self.run, self.label = run, label
        self.tokenizer = Tokenizer(run)
        self.planned = _planned_steps(run)
        self._facts: Facts | None = None
        self._lock = threading.Lock()

    def facts(self) -> Facts:
        """Return the run's facts, read again if a file has changed. Raises RunDirectoryError for a damaged one."""
        with self._lock:
            signature = self.signature()
            if self._facts is None or self._facts.signature != signature:
                notes: list[str] = []
                records = tuple(read_metrics(self.run))
                last = records[-1].step if records else None
                scores = tuple(read_scores(self.run, last, notes))
                self._facts = Facts(signature, records, tuple(read_events(self.run)), scores, tuple(notes))
            return self._facts

    def signature(self) -> str:
        """Return a text that changes when metrics, events or scores do."""
        paths = (self.run.metrics_path, self.run.events_path, self.run.scores_path)
        return "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" if (stat := _stat(path)) else "0" for path in paths)

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Healthy ranges of the run's own recipe; none if this version cannot read it."""
        try:
            return load([str(self.run.recipe_path)]).health.ranges
        except LockstepError:
            return {}

    @property
    def live(self) -> bool:
        """True if a process trains it now, as far as this machine can tell."""
        holder = read_holder(self.run.path / LOCK)
        return holder is not None and holder.alive is True


def open_runs(paths: Sequence[Path]) -> list[ViewedRun]:
    """Open runs to look at. Raises RunDirectoryError for one that is none, or named twice."""
    runs = [RunDirectory.open(path) for path in paths]
    places = [run.path.resolve() for run in runs]
    if len(set(places)) < len(places):
        twice = max(places, key=places.count)
        raise RunDirectoryError("the run is given twice", where=str(twice), fix="give each run once")
    names = [place.name for place in places]
    labels = [
        name if names.count(name) == 1 else f"{place.parent.name}/{name}"
        for name, place in zip(names, places, strict=True)
    ]
    labels = [label if labels.count(label) == 1 else str(place) for label, place in zip(labels, places, strict=True)]
    return [ViewedRun(run, label) for run, label in zip(runs, labels, strict=True)]


def _planned_steps(run: RunDirectory) -> int | None:
    try:
        steps = run.settings().get("steps")
    except RunDirectoryError:
        return None
    return steps if isinstance(steps, int) else None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None
