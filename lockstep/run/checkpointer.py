"""Saves the checkpoints of a run, remembers which step was best, and deletes checkpoints that are no longer kept."""

from __future__ import annotations

import math

from lockstep.build.disk import check_first
from lockstep.build.parts import Parts
from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.schema import Recipe
from lockstep.run.logger import Clock, RunLogger
from lockstep.run.state import save_checkpoint
from lockstep.track.jsonl import number
from lockstep.track.writer import read_metrics
from lockstep.types import Metrics, Proof


class Checkpointer:
    """Saves checkpoints and remembers which step was best by the recipe's metric."""

    def __init__(self, parts: Parts, recipe: Recipe, logger: RunLogger, start: int) -> None:
        self._parts, self._recipe, self._logger, self._start = parts, recipe, logger, start
        self._best: tuple[float, int] | None = best_so_far(recipe, logger, start)

    def note(self, step: int, metrics: Metrics) -> bool:
        """Return True if these are the best weights so far, which must be saved."""
        name = self._recipe.save.keep_best
        value = math.nan if name is None else metrics.get(name, math.nan)
        if math.isnan(value) or (self._best is not None and value <= self._best[0]):
            return False
        self._best = (value, step)
        return True

    def save(self, step: int, proof: Proof, clock: Clock) -> None:
        """Write the checkpoint of a step that is already logged, and add its duration to the step's metrics."""
        best, rows, recipe, logger = self._best, self._logger.writer.rows, self._recipe, self._logger
        with clock("save"):
            first = not any(info.complete for info in list_checkpoints(logger.run.path))
            path = save_checkpoint(logger.run.path, self._parts, recipe, step, proof, best, rows)
            logger.event("checkpoint", str(path.name), step=step, fingerprint=proof.fingerprint)
            logger.saved(path)
            if step == recipe.steps and best is None and (name := recipe.save.keep_best):
                logger.warn(f"save.keep_best: no step of this run has {name}, so none was kept as the best", step=step)
            if first and (warning := check_first(recipe, self._parts.policy.resolved.path, path)):
                logger.warn(warning, step=step)
        if step > self._start:  # the row of the step that the attempt begins with is whole
            logger.add(step, {"time/save": clock.seconds["time/save"]})


def best_so_far(recipe: Recipe, logger: RunLogger, start: int) -> tuple[float, int] | None:
    """Return the best value and step so far, as the checkpoint of step `start` has them."""
    infos = {info.step: info for info in list_checkpoints(logger.run.path) if info.complete}
    name = recipe.save.keep_best
    if name is None or start not in infos:
        return None
    match infos[start].meta.get("best", "unknown"):
        case [value, int(step)] if step in infos:
            return number(value), step
        case [_, int(step)]:
            logger.warn(f"save.keep_best: the best checkpoint so far, of step {step}, is not there", step=start)
            return None
        case None:
            return None
    # a checkpoint of an older version
    rows = [row for row in read_metrics(logger.run) if name in row.metrics and row.step in infos and row.step <= start]
    return max(((row.metrics[name], row.step) for row in rows), key=lambda row: (row[0], -row[1]), default=None)
