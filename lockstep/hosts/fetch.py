"""Fetches the results of a job: each file is checked by its hash, then put where the command would have written it here."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.config.load import load
from lockstep.config.text import read, to_yaml
from lockstep.errors import EvaluationError, HostError
from lockstep.evaluation.records import read_brief, read_score, write_score
from lockstep.hosts.connection import Connection
from lockstep.models.cache import sha256_of
from lockstep.track.files import write_atomic
from lockstep.types import Score

STAGE = Path(".lockstep/fetch")


def fetch(link: Connection, job: str) -> tuple[list[str], int]:
    """Fetch what a job made. Returns lines for the user, and the command's exit code. A second call continues the first.

    Raises HostError for a job that has not ended, and for a file whose bytes are not those that the job wrote.
    """
    found = link.call("results", job=job, fetched=False)
    done, record = found["exit"], found["job"]
    if done is None:
        fix = f"wait until it has ended, then fetch: lockstep host tail {link.name} {job} -f"
        raise HostError(f"the job {job} has no results yet: it is {found['state']}", where=f"host {link.name}", fix=fix)
    stage = STAGE / f"{link.name}-{job}"
    stage.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = done["files"]
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise HostError(
                f"the file name {name!r} points outside the job's folder",
                where=f"host {link.name}",
                fix="do not use this machine: its files cannot be trusted",
            )
    wanted = [name for name, one in files.items() if not _whole(stage / name, one)]
    if wanted:
        link.pull(f"jobs/{job}/work", wanted, stage)
    damaged = [name for name in wanted if not _whole(stage / name, files[name])]
    for name in damaged:
        (stage / name).unlink(missing_ok=True)
    if damaged:
        what = f"fetched files differ from those that the job wrote, and were deleted: {', '.join(damaged)}"
        raise HostError(what, where=f"host {link.name}", fix="fetch again; if they still differ, run the job again")
    placing = _Placing(link.name, job, record["paths"], stage)
    lines = placing.all_of([*files])
    link.call("results", job=job, fetched=True)
    shutil.rmtree(stage)
    return lines, int(done["code"])


def _whole(path: Path, one: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == one["bytes"] and sha256_of(path) == one["sha256"]


class _Placing:
    def __init__(self, host: str, job: str, paths: dict[str, str], stage: Path) -> None:
        self.host, self.job, self.paths, self.stage = host, job, paths, stage

    def all_of(self, names: list[str]) -> list[str]:
        """Put every file in its place. Raises HostError, before any is touched, if another file or run is in one."""
        runs = [str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name == "manifest.json"]
        single = [name for name in names if not any(name.startswith(f"{run}/") for run in runs)]
        taken = [self.here(run) for run in runs if Path(self.here(run)).exists()]
        for name in single:
            place = Path(self.here(name))
            if place.exists() and self._score(name) is None and sha256_of(place) != sha256_of(self.stage / name):
                taken.append(str(place))
        if taken:
            what = "another file or run of this name is already here"
            raise HostError(what, where=", ".join(taken), fix="move or rename it, then fetch again")
        return [line for name in single for line in self._file(name)] + [self._run(run) for run in runs]

    def here(self, name: str) -> str:
        """Return the path here of a name, or of a path, there."""
        for there, here in self.paths.items():
            if name == there or name.startswith(f"{there}/"):
                return here + name[len(there) :]
        return name

    def _text(self, text: str) -> str:
        """Return a text in which the paths of files that were sent are those here."""
        for there, here in self.paths.items():
            text = text.replace(there, here)  # inputs/3/… is one place alone
        return text

    def _score(self, name: str) -> Score | None:
        if not name.endswith(".json"):
            return None
        try:
            return read_score(self.stage / name)
        except EvaluationError:
            return None

    def _file(self, name: str) -> list[str]:
        place = Path(self.here(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        there = self._score(name)
        if there is None:
            _move(self.stage / name, place)
            return [f"fetched: {place}"]
        return self._place_score(place, there)

    def _place_score(self, place: Path, there: Score) -> list[str]:
        """Store a score as if it had been measured here: its paths are those of this machine, its source names the host."""
        from lockstep.scoring.score import agreement, conditions_digest, free_path

        conditions = replace(
            there.conditions, model=self.here(there.conditions.model), task=self._text(there.conditions.task)
        )
        score = replace(there, conditions=conditions, source=f"{self._text(there.source)}, on {self.host}")
        if place.parent.name == conditions_digest(replace(there.conditions, weights="")):
            place = place.parent.with_name(conditions_digest(replace(conditions, weights=""))) / place.name
        elif place.parent.name == conditions_digest(there.conditions):
            place = place.parent.parent / place.name
        place = free_path(place, conditions)
        if place.exists():
            return [agreement(read_brief(place).score.conditions.mode, score, read_score(place), place)]
        write_score(place, score)
        return [f"stored: {place}"]

    def _run(self, name: str) -> str:
        from lockstep.run.state import recipe_hash  # imports torch

        folder, place = self.stage / name, Path(self.here(name))
        tree: Any = read(folder / "recipe.yaml").value
        (folder / "recipe.yaml").write_text(to_yaml(self._tree(tree)))
        manifest = json.loads((folder / "manifest.json").read_text())
        # Its recipe names paths of this machine now: a resume here knows the checkpoints by the hash that it had there.
        fetched = {"host": self.host, "job": self.job, "recipe": manifest.get("recipe", "")}
        facts = {"fetched_from": fetched, "recipe": recipe_hash(load([str(folder / "recipe.yaml")]))}
        write_atomic(folder / "manifest.json", json.dumps(manifest | facts, indent=2))
        place.parent.mkdir(parents=True, exist_ok=True)
        _move(folder, place)
        return f"fetched: {place}, a run of {manifest.get('host', self.host)}"

    def _tree(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._tree(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._tree(inner) for inner in value]
        return self._text(value) if isinstance(value, str) else value


def _move(source: Path, place: Path) -> None:
    """Give a file or folder its name at once, also on another disk."""
    try:
        source.rename(place)
    except OSError:
        fresh = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        shutil.copytree(source, fresh) if source.is_dir() else shutil.copyfile(source, fresh)
        fresh.rename(place)
