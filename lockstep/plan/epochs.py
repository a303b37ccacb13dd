"""Converts `epochs` to steps: counts the training rows, the steps of one pass over them, and how often each row is seen."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.load import load_mapping
from lockstep.config.schema import FileTask, Recipe
from lockstep.errors import ConfigError, LockstepError
from lockstep.tasks.file import count_training_rows


def steps_of_epochs(recipe: Recipe) -> tuple[int, int]:
    """Return the training rows and the steps of `epochs` passes over them. Raises DataError for rows that cannot be read, and
    ConfigError if they are too few.
    """
    assert recipe.epochs is not None
    assert isinstance(recipe.task, FileTask)  # the recipe's own validation
    rows, size = count_training_rows(recipe.task), recipe.prompts_per_step
    if rows < size:
        raise ConfigError(
            [f"prompts_per_step={size}, but the task has only {rows} training rows"],
            fix=f"set prompts_per_step to {rows} or less",
        )
    return rows, max(1, round(recipe.epochs * (rows // size)))


def with_steps_of_epochs(recipe: Recipe) -> Recipe:
    """Return the recipe with the steps that its epochs mean, or fewer if `steps` asks for fewer."""
    if recipe.epochs is None:
        return recipe
    _, steps = steps_of_epochs(recipe)
    if "steps" in recipe.model_fields_set:
        steps = min(steps, recipe.steps)
    tree = recipe.model_dump(mode="json") | {"steps": steps, "epochs": None}
    return load_mapping(tree, where=f"{recipe.name} with the {steps} steps of {recipe.epochs:g} epochs")


def short_horizon(recipe: Recipe) -> None:
    """Raise ConfigError if the recipe asks for more steps than its epochs have."""
    if recipe.epochs is None or "steps" not in recipe.model_fields_set:
        return
    rows, steps = steps_of_epochs(recipe)
    if steps < recipe.steps:
        raise ConfigError(
            [
                f"steps={recipe.steps} cannot be reached: {recipe.epochs:g} passes over {rows} rows, "
                f"{recipe.prompts_per_step} per step, end after {steps} steps ({steps * recipe.updates_per_step} optimizer steps)"
            ],
            fix=f"set epochs={recipe.steps / (rows // recipe.prompts_per_step):g}, or leave epochs out",
        )


def seen_lines(recipe: Recipe) -> list[str]:
    """Say how often a run asks each row; nothing for a task that makes its questions or whose rows are not on this machine."""
    task = recipe.task
    if recipe.loop != "rl" or not isinstance(task, FileTask) or not Path(task.data.source).expanduser().exists():
        return []
    try:
        rows = count_training_rows(task)
    except LockstepError:  # a run says what is wrong with them
        return []
    if rows < recipe.prompts_per_step:
        return []
    asked = recipe.steps * recipe.prompts_per_step
    each = asked / rows
    rounds = "; dynamic sampling asks for more" if recipe.algorithm.dynamic_sampling.enabled else ""
    often = f"each is asked {each:.3g} times on average" if each >= 1 else f"{asked} are asked, {1 - each:.0%} never"
    return [
        f"{rows} rows to train on: {often} ({recipe.steps} steps x {recipe.prompts_per_step}), with "
        f"{recipe.samples_per_prompt} replies each time; a pass over all is {rows // recipe.prompts_per_step} steps{rounds}"
    ]
