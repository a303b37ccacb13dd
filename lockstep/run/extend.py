"""Extends a run beyond the number of steps that it was started with: `lockstep train --resume RUN --steps N`."""

from __future__ import annotations

from lockstep.config.schema import MOST_STEPS, Recipe
from lockstep.errors import ConfigError
from lockstep.track.rundir import RunDirectory

EXTENDED = "extended"
"""Entry of the manifest: every number of steps that the run has had, in order."""


def extend(recipe: Recipe, steps: int, run: RunDirectory) -> Recipe:
    """Return the run's recipe with more steps. Raises ConfigError where the steps already made would have been others."""
    again = f"begin a new run from its weights: lockstep train RECIPE warm_start={run.path} steps={steps} name=NAME"
    if steps <= recipe.steps:
        raise ConfigError(
            [f"--steps {steps} is too low: the run has {recipe.steps} steps already, and --steps is the last step"],
            fix=f"give more than {recipe.steps}, or resume without --steps",
        )
    if steps > MOST_STEPS:  # the run's recipe.yaml could not be read again
        raise ConfigError([f"--steps {steps} is too high: must be at most {MOST_STEPS}"], fix="give fewer steps")
    if why := _depends_on_length(recipe):
        raise ConfigError([f"--steps {steps}: the run cannot be made longer: {why}"], fix=again)
    return recipe.model_copy(update={"steps": steps})


def began_with(recipe: Recipe, run: RunDirectory) -> Recipe:
    """Return the recipe with the number of steps that the run was started with."""
    earlier = lengths(run)
    return recipe.model_copy(update={"steps": earlier[0]}) if earlier else recipe


def lengths(run: RunDirectory) -> list[int]:
    """Return every number of steps that an extended run has had, the present one last; nothing for any other."""
    return [int(steps) for steps in run.manifest().get(EXTENDED, [])]


def _depends_on_length(recipe: Recipe) -> str:
    """Say which setting plans over the whole length; "" if none does."""
    settings = recipe.optimizer
    if settings.schedule != "constant":
        return (
            f"optimizer.schedule={settings.schedule} lowers the learning rate over {recipe.steps} steps; in a longer run "
            "the rates of the steps already made would have been higher"
        )
    if settings.warmup_ratio:
        return f"optimizer.warmup_ratio={settings.warmup_ratio:g} makes the warm-up a share of {recipe.steps} steps"
    if recipe.noise is not None:
        return f"the stages of noise are spread over {recipe.steps} steps"
    return ""
