"""A run as a Python object: its recipe, and its metrics, rollouts, scores and events as pandas data frames."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.errors import MachineError, RunDirectoryError
from lockstep.evaluation.records import read_brief
from lockstep.track.rollouts import RolloutRow, read_rollouts, rollout_steps
from lockstep.track.rundir import RunDirectory
from lockstep.track.state import RunState, state_of
from lockstep.track.writer import read_events, read_metrics

if TYPE_CHECKING:
    import pandas as pd

    from lockstep.api.figure import RunFigure


def path_text(path: str | PathLike[str]) -> str:
    """Return a path as text. Raises RunDirectoryError for one that no file can have."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            what, where = "no file or folder can have so long a name", os.fspath(path)[:100] + "…"
            raise RunDirectoryError(what, where=where, fix="correct the path") from error
    return os.fspath(path)


class Run(os.PathLike[str]):
    """A run directory. Everything is read when it is asked for, so a run that is going on can be watched.

    Raises RunDirectoryError if there is no run at `path`.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._directory = RunDirectory.open(path_text(path))
        self.path: Path = self._directory.path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        state = self.state
        rows = read_metrics(self._directory)
        at = f", step {rows[-1].step} of {self.recipe.steps}" if rows else ""
        return f"Run({str(self.path)!r}): {state.name}{at}" + (f", {state.reason}" if state.reason else "")

    @property
    def name(self) -> str:
        return self._directory.name

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return load([str(self._directory.recipe_path)])

    @property
    def manifest(self) -> dict[str, Any]:
        """Code, packages, machine, data and attempts of the run."""
        return self._directory.manifest()

    @property
    def state(self) -> RunState:
        """Running, finished or stopped, with the reason."""
        return state_of(self._directory)

    @property
    def metrics(self) -> pd.DataFrame:
        """A row per step, a column per metric; step 0 is the base model. `lockstep metrics list` explains the columns."""
        rows = read_metrics(self._directory)
        frame = _pandas().DataFrame([row.metrics for row in rows], index=[row.step for row in rows])
        return frame.rename_axis("step")

    @property
    def events(self) -> pd.DataFrame:
        """A row per event of all attempts: starts, proofs, checkpoints, warnings, stops."""
        pandas = _pandas()
        columns = ["time", "attempt", "kind", "step", "message", "facts"]
        frame = pandas.DataFrame([asdict(event) for event in read_events(self._directory)], columns=columns)
        return frame.assign(time=pandas.to_datetime(frame["time"], utc=True), step=frame["step"].astype("Int64"))

    @property
    def scores(self) -> pd.DataFrame:
        """A row per number of each stored score, with its interval, conditions and file; shares, not per cent."""
        files = sorted(self._directory.scores_path.rglob("*.json"))
        rows = [row for file in files for row in _score_rows(file)]
        return _pandas().DataFrame(rows, columns=list(_SCORE_COLUMNS)).sort_values("step", ignore_index=True)

    def rollouts(self, step: SupportsIndex | Iterable[SupportsIndex] | None = None) -> pd.DataFrame:
        """Return a row per graded reply of a step, of several, or of all that are stored; grade metrics are columns metric/…

        Raises RunDirectoryError if a step's rollouts are not stored.
        """
        steps = rollout_steps(self._directory) if step is None else _steps(step)
        names = [field.name for field in fields(RolloutRow)]
        rows = [
            {"step": one, "question": row.messages[-1]["content"] if row.messages else ""}
            | {name: getattr(row, name) for name in names}  # asdict would copy every token
            | {f"metric/{name}": value for name, value in row.metrics.items()}
            | {"right": row.right}
            for one in steps
            for row in read_rollouts(self._directory, one)
        ]
        return _pandas().DataFrame(rows).drop(columns="metrics", errors="ignore")

    def plot(self, *names: str, beside: Sequence[Run] = (), smooth: int = 1) -> RunFigure:
        """Draw metrics over the steps, one panel each; a notebook shows the returned figure. Default: the run's main curves.

        `beside`: runs to draw in the same panels. `smooth`: steps of the moving average. Raises ConfigError for a metric that
        no run has.
        """
        from lockstep.api.figure import draw

        return draw({str(run.path): run.metrics for run in (self, *beside)}, names, smooth)


_SCORE_COLUMNS = (
    *("step", "task", "mode", "estimate", "value", "se", "low", "high", "items", "truncated", "unscored"),
    *("mean_tokens", "numerics", "weights", "file"),
)


def _score_rows(file: Path) -> list[dict[str, Any]]:
    score = read_brief(file).score
    shared = {name: getattr(score, name) for name in ("step", "truncated", "unscored", "mean_tokens")}
    shared |= {name: getattr(score.conditions, name) for name in ("task", "mode", "numerics", "weights")}
    numbers = ("value", "se", "low", "high", "items")
    return [
        {**shared, "estimate": one.name, **{name: getattr(one, name) for name in numbers}, "file": str(file)}
        for one in score.estimates
    ]


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MachineError("pandas is not installed", fix="pip install 'lockstep-rl[notebook]'") from error
    return pandas


def _steps(step: SupportsIndex | Iterable[SupportsIndex]) -> list[int]:
    """Return steps as whole numbers; those of an index or a column are numpy's."""
    return [index(one) for one in (step if isinstance(step, Iterable) else [step])]
