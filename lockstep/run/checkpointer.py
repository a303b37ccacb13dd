"""The checkpoints that a run writes and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.build.disk import check_first
from lockstep.build.parts import Parts
from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.schema import Recipe
from lockstep.errors import HealthStop
from lockstep.run.logger import Clock, RunLogger
from lockstep.run.state import save_checkpoint
from lockstep.track.writer import read_metrics
from lockstep.types import Metrics, Proof


class Checkpointer:
    """Saves checkpoints and remembers which step was best by the recipe's metric."""

    def __init__(self, parts: Parts, recipe: Recipe, logger: RunLogger) -> None:
        self._parts, self._recipe, self._journal = parts, recipe, logger
        self._best: tuple[float, int] | None = best_so_far(recipe, logger)

    def note(self, step: int, metrics: Metrics) -> bool:
        """Return True if these are the best weights so far, which must be saved."""
        name = self._recipe.save.keep_best
        if name is None or name not in metrics or (self._best is not None and metrics[name] <= self._best[0]):
            return False
        self._best = (metrics[name], step)
        return True

    @contextmanager
    def saving_if_stopped(self, step: int, proof: Proof, clock: Clock) -> Iterator[None]:
        """Guard a block that does not change the weights of `step`: if the run must stop inside it, they are saved first."""
        try:
            yield
        except HealthStop:
            if step and all(info.step != step for info in list_checkpoints(self._journal.run.path)):
                self.save(step, proof, clock)
            raise

    def save(self, step: int, proof: Proof, clock: Clock) -> None:
        """Write the checkpoint of a step that is already logged, and add its duration to the step's metrics."""
        with clock("save"):
            self._save(step, proof)
        self._journal.add(step, {"time/save": clock.seconds["time/save"]})

    def _save(self, step: int, proof: Proof) -> None:
        best = self._best[1] if self._best else None
        first = not any(info.complete for info in list_checkpoints(self._journal.run.path))
        path = save_checkpoint(self._journal.run.path, self._parts, self._recipe, step, proof, best)
        self._journal.event("checkpoint", str(path.name), step=step, fingerprint=proof.fingerprint)
        if step == self._recipe.steps and best is None and (name := self._recipe.save.keep_best):
            self._journal.warn(
                f"save.keep_best: no step of this run has {name}, so none was kept as the best", step=step
            )
        if first and (warning := check_first(self._recipe, self._parts.policy.resolved.path, path)):
            self._journal.warn(warning, step=step)


def best_so_far(recipe: Recipe, logger: RunLogger) -> tuple[float, int] | None:
    """Return the best step of the records that a resumed run continues, among those whose checkpoint was completed."""
    name = recipe.save.keep_best
    if name is None:
        return None
    saved = {info.step for info in list_checkpoints(logger.run.path) if info.complete}
    rows = [
        (row.metrics[name], row.step) for row in read_metrics(logger.run) if name in row.metrics and row.step in saved
    ]
    return max(rows, key=lambda row: (row[0], -row[1])) if rows else None
