"""`lockstep plan`: what a recipe amounts to, before anything is loaded: batches, objective, rates, evaluations, memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.config.load import load_run

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe


@dataclass(frozen=True, slots=True)
class PlanSection:
    """A heading and what is printed under it; a section without lines is left out."""

    title: str
    lines: Callable[[Recipe], list[str]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `plan RECIPE...`."""
    parser = subparsers.add_parser(
        "plan", help="print what a recipe amounts to: batches, objective, rates, evaluations, memory"
    )
    parser.add_argument("recipe", nargs="+", metavar="RECIPE|a.b=c", help="recipe files and overrides; later ones win")
    parser.add_argument("--gpu-gib", type=float, help="plan the memory of a GPU of this size, which need not be here")


def run(args: argparse.Namespace) -> int:
    """Print the plan, section by section. Raises ConfigError for a recipe with mistakes; no model is loaded."""
    recipe, notes = _with_steps(load_run(args.recipe))
    print(
        "\n".join(
            [
                *notes,
                *plan_text(recipe),
                "",
                "Memory and disk",
                *(f"  {line}" for line in _memory(recipe, args.gpu_gib)),
                "",
                "data and grader were not opened: `lockstep doctor RECIPE` opens them and says whether a run would start",
            ]
        )
    )
    return 0


def _with_steps(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with the steps that sft.epochs mean, where its rows can be read; else a line that says why not."""
    if recipe.sft is None or recipe.sft.epochs is None:
        return recipe, []
    from lockstep.errors import ConfigError, DataError, RunDirectoryError
    from lockstep.loops.sft_data import with_steps

    try:
        return with_steps(recipe), []
    except (ConfigError, DataError, RunDirectoryError) as error:
        line = f"the steps of {recipe.sft.epochs:g} epochs are not known here ({error}); {recipe.steps} stand in for them below"
        return recipe, [line, ""]


def plan_text(recipe: Recipe) -> list[str]:
    """All sections that have something to say, with their headings."""
    lines = [f"{recipe.name}: {recipe.loop}, task {recipe.task.kind}, {recipe.steps} steps"]
    for section in SECTIONS:
        if found := section.lines(recipe):
            lines += ["", section.title, *(f"  {line}" for line in found)]
    return lines


def _batch(recipe: Recipe) -> list[str]:
    from lockstep.plan.batch import batch_lines

    return batch_lines(recipe)


def _objective(recipe: Recipe) -> list[str]:
    from lockstep.algorithms.build import build_objective

    return build_objective(recipe).formula.splitlines()


def _rate(recipe: Recipe) -> list[str]:
    from lockstep.plan.schedule import rate_lines

    return rate_lines(recipe)


def _evaluation(recipe: Recipe) -> list[str]:
    from lockstep.plan.schedule import checkpoint_lines, evaluation_lines

    return [*evaluation_lines(recipe), *checkpoint_lines(recipe)]


def _health(recipe: Recipe) -> list[str]:
    from lockstep.health.rules import health_lines

    return health_lines(recipe)


def _misfits(recipe: Recipe) -> list[str]:
    from lockstep.plan.fit import misfits

    return [line for error in misfits(recipe) for line in str(error).splitlines()]


def _memory(recipe: Recipe, gpu_gib: float | None) -> list[str]:
    from lockstep.plan.preview import disk_preview, preview_lines

    return [*preview_lines(recipe, gpu_gib), *disk_preview(recipe, gpu_gib)]


SECTIONS: tuple[PlanSection, ...] = (
    PlanSection("Batch", _batch),
    PlanSection("Objective", _objective),
    PlanSection("Learning rate", _rate),
    PlanSection("Evaluations and checkpoints", _evaluation),
    PlanSection("Health", _health),
    PlanSection("A run would be refused: these settings do not fit the model", _misfits),
)
"""In the order in which they are printed. To add one: a function from a recipe to its lines, and an entry here."""
