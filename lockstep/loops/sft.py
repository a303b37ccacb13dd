"""The supervised loop, end to end: rows → batch → update → (validation loss, generated accuracy, save)."""

from __future__ import annotations

from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.loops.sft_data import SftRows, settings_of, sft_batch, validation_metrics, validation_steps
from lockstep.run.logger import RunLogger
from lockstep.run.session import Measure, Session


def train(parts: Parts, recipe: Recipe, rows: SftRows, logger: RunLogger, start: int) -> None:
    """Train from `start` finished steps to the recipe's number, or until eval.stop or a health rule ends the run.

    The engine gets the weights only when they are scored or saved. Raises Interrupted, after saving, on SIGTERM or SIGINT;
    SyncError, LearnerError or HealthStop if the run must stop.
    """
    size = settings_of(recipe).sequences_per_step
    steps = validation_steps(recipe) if rows.validation else ()
    validate = Measure("validate", frozenset(steps), lambda: validation_metrics(parts, rows))
    with Session(parts, recipe, logger, start, [validate]) as session:
        session.measure_start()
        for step in session.steps():
            with session.clock("update"):
                metrics = parts.learner.update(sft_batch(parts, recipe, rows, step), parts.objective.loss)
            metrics |= {"batch/samples": float(size), "sft/epoch": (step + 1) / (len(rows.train) // size)}
            session.finish(step, metrics)
