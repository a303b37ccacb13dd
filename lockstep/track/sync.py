"""Compares a run with its trackers: which steps a tracker lacks, and why they cannot be sent to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lockstep.config.records import Mode, Sink
from lockstep.config.schema import Recipe
from lockstep.errors import ConfigError
from lockstep.text import hide_secrets
from lockstep.track.lock import Lock
from lockstep.track.rundir import LOCK, RunDirectory
from lockstep.track.sinks import Record, Sender, check_installed, missing, reason, stored_record, told
from lockstep.track.trackers import has_wandb_key, wandb_address
from lockstep.track.writer import read_metrics

LOCAL = ("trackio", "tensorboard")
CONNECT_S = 5.0


def sync(path: Path, recipe: Recipe, name: str | None = None) -> Iterator[tuple[bool, str]]:
    """Send to each tracker of a run the steps that it misses, by the last step that it holds itself. Yields for each whether it
    went well, and a line.

    `name`: this tracker alone. Raises ConfigError if it is not among the run's, or one is not installed; RunLockedError while
    the run is being trained.
    """
    track = recipe.track
    sinks = [sink for sink in track.sinks if sink.mode != "off" and name in (None, sink.name)]
    if name is not None and not sinks:
        names = ", ".join(sink.name for sink in track.sinks if sink.mode != "off") or "none"
        raise ConfigError([f"--tracker {name}: the run has no such tracker; it has {names}"], where=str(path))
    check_installed(track.model_copy(update={"sinks": sinks}))
    RunDirectory.open(path)
    lock = Lock(path / LOCK)
    with RunDirectory(path, lock, attempt=2) as run:
        for sink in sinks:
            yield _sync_one(run, recipe, sink)


def _sync_one(run: RunDirectory, recipe: Recipe, sink: Sink) -> tuple[bool, str]:
    mode: Mode = "online" if sink.name in ("wandb", "mlflow", "swanlab") else sink.mode
    about = told(recipe.track, sink, run, recipe.name, recipe.model_dump(mode="json"), mode)
    errors: list[Exception] = []
    sender = Sender(sink, run, about, recipe.track.timeout_s, lambda _, error: errors.append(error))
    sender.open(None)
    sender.wait()
    sent = sender.caught_up
    line = f"sent steps {sent[0]} to {sent[-1]} ({len(sent)})" if sent else "nothing is missing"
    if errors:
        line = f"{f'{line}, then ' if sent else ''}failed: {reason(errors[0])}"
    return not errors, f"{sink.name}: {line}"


def findings(recipe: Recipe, run: Path | None) -> list[tuple[str, str, str]]:
    """Return (verdict, what was looked at, finding) for each tracker of a recipe: package, key, network, project, files."""
    if not recipe.track.sinks:
        return [("ok", "track.sinks", "no tracker is asked for; metrics.jsonl has every number")]
    return [row for sink in recipe.track.sinks for row in _of_sink(sink, recipe, run)]


def _of_sink(sink: Sink, recipe: Recipe, run: Path | None) -> Iterator[tuple[str, str, str]]:
    name = sink.name
    if sink.mode == "off":
        yield "ok", name, "off"
        return
    why = missing(name)
    yield ("fail", f"{name} package", why) if why else ("ok", f"{name} package", "is there")
    address = _address(sink)
    online = bool(address) and sink.mode != "offline"
    if name == "wandb":
        key = has_wandb_key()
        told_mode = os.environ.get("WANDB_MODE")
        yield (
            ("ok", "wandb key", "found (its value is never shown)")
            if key
            else ("warn", "wandb key", "none: the run is tracked offline; set WANDB_API_KEY, in .env for example")
        )
        if told_mode and sink.mode == "auto":
            yield "ok", "wandb mode", f"WANDB_MODE={told_mode}"
            online = online and told_mode == "online"
        online = online and key
    if online:
        yield _reached(name, address)
    yield (
        "ok",
        f"{name} project",
        recipe.track.project + (f", group {recipe.track.group}" if recipe.track.group else ""),
    )
    if run is not None:
        yield _files(name, run)


def _files(name: str, run: Path) -> tuple[str, str, str]:
    record = stored_record(run, name) or Record("")
    last = max((row.step for row in read_metrics(RunDirectory.open(run))), default=-1)
    sent = ", ".join(f"{mode} up to step {step}" for mode, step in record.sent.items()) or "nothing yet"
    text = f"{sent}; the run has {max(last, 0)} steps" + (f"; left behind: {record.failed}" if record.failed else "")
    if name not in LOCAL and record.sent.get("online", -1) < last:
        return "warn", f"{name} files", f"{text}. Send the rest: lockstep track sync {run}"
    return "ok", f"{name} files", text


def _address(sink: Sink) -> str:
    settings: Mapping[str, Any] = sink.settings
    match sink.name:
        case "wandb":
            return wandb_address()
        case "mlflow":
            return str(settings.get("uri") or os.environ.get("MLFLOW_TRACKING_URI") or "")
        case "swanlab":
            return "https://api.swanlab.cn" if os.environ.get("SWANLAB_API_KEY") else ""
        case _:
            return str(settings.get("server_url") or "")


def _reached(name: str, address: str) -> tuple[str, str, str]:
    try:
        parts = urlparse(address)
        port = parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        return "warn", f"{name} network", f"{hide_secrets(address)} is no address"
    if not parts.hostname:
        return "ok", f"{name} network", f"{hide_secrets(address)} is no address of a network"
    try:
        socket.create_connection((parts.hostname, port), CONNECT_S).close()
    except OSError as error:
        return (
            "warn",
            f"{name} network",
            f"{parts.hostname}:{port} does not answer ({error}); the run goes on without it",
        )
    return "ok", f"{name} network", f"{parts.hostname}:{port} answers"
