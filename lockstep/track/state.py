"""The state of a run, read from its events and its lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lockstep.track.lock import read_holder
from lockstep.track.rundir import LOCK, RunDirectory
from lockstep.track.writer import Event, read_events

StateName: TypeAlias = Literal["running", "finished", "stopped", "interrupted", "failed", "killed"]
BOUNDARIES = ("start", "resume", "finished", "stopped")
"""Kinds of events that begin or end an attempt."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run. Example: RunState("stopped", "the gradient was 0 in 20 steps", "2026-11-22T10:00:00.000Z")"""

    name: StateName
    """stopped: by a health rule. interrupted: by a signal, after saving. failed: by another error. killed: no recorded reason."""
    reason: str
    time: str
    """Time of the event that decides the state, UTC."""


def state_of(run: RunDirectory) -> RunState:
    """Return the state of a run. Raises RunDirectoryError if its events cannot be read."""
    last = next((event for event in reversed(read_events(run)) if event.kind in BOUNDARIES), None)
    holder = read_holder(run.path / LOCK)
    if holder is not None and holder.alive is not False:
        return RunState("running", str(holder), last.time if last else holder.since)
    if last is None:
        return RunState("killed", "before its first event", str(run.manifest().get("time", "")))
    return RunState(_name(last), last.message if last.kind == "stopped" else "", last.time)


def _name(event: Event) -> StateName:
    if event.kind == "finished":
        return "finished"
    if event.kind != "stopped":
        return "killed"
    names: dict[str, StateName] = {"HealthStop": "stopped", "Interrupted": "interrupted"}
    return names.get(str(event.facts.get("error")), "failed")
