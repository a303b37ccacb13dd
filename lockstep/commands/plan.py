"""`lockstep plan`: shows what a recipe would run, before anything is loaded: batches, objective, rates, evaluations, memory."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, get_args

from lockstep.config.load import load_run
from lockstep.config.schema import Allowable

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `plan RECIPE...`."""
    parser = subparsers.add_parser(
        "plan", help="print what a recipe amounts to: batches, objective, rates, evaluations, memory"
    )
    parser.add_argument("recipe", nargs="+", metavar="RECIPE|a.b=c", help="recipe files and overrides; later ones win")
    add_allow(parser)
    parser.add_argument(
        "--fit", action="store_true", help="propose settings that fit the machine, each with its reason"
    )
    parser.add_argument(
        "--time", action="store_true", help="measure a step on this machine; loads the model, takes seconds"
    )
    parser.add_argument("--gpu-gib", type=_size, help="plan the memory of a GPU of this size, which need not be here")


def _size(text: str) -> float:
    """Return a size above 0, for argparse."""
    size = float(text)
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return size


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Register `--allow NAME` of `plan`, `doctor` and `train`."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        choices=get_args(Allowable),
        help=f"let this refusal through: {', '.join(get_args(Allowable))}; repeatable, kept in the manifest",
    )


def load_allowed(args: argparse.Namespace) -> Recipe:
    """Return the recipe, with the refusals of `--allow` let through. Raises ConfigError for a recipe with mistakes."""
    recipe = load_run(args.recipe)
    return recipe.model_copy(update={"allow": sorted({*recipe.allow, *args.allow})}) if args.allow else recipe


def run(args: argparse.Namespace) -> int:
    """Print the plan, section by section. Raises ConfigError for a recipe with mistakes, RefusedError for one whose run would be
    refused; no model is loaded.
    """
    asked = load_allowed(args)  # first: what comes next loads torch, and a mistake is told without that wait
    from lockstep.errors import RefusedError
    from lockstep.plan.refusals import refusal_lines, refusals

    recipe, notes = _with_steps(asked)
    found = refusals(asked, args.gpu_gib)
    allowed = [one for one in found if one.allowed]
    print(
        "\n".join(
            [
                *notes,
                *plan_text(recipe),
                "",
                "Memory and disk",
                *(f"  {line}" for line in _memory(recipe, args.gpu_gib, refused=bool(found))),
                *(["", "Proposal", *(f"  {line}" for line in _fit(recipe, args.gpu_gib))] if args.fit else []),
                *(["", "Let through", *(f"  {line}" for line in refusal_lines(allowed))] if allowed else []),
                "",
                "data and grader were not opened: `lockstep doctor RECIPE` opens them and says whether a run would start",
            ]
        )
    )
    if stand := [one for one in found if not one.allowed]:
        raise RefusedError(refusal_lines(stand))
    if args.gpu_gib is None:
        print("\n".join(["", "Time", *(f"  {line}" for line in _time(recipe, measure=args.time))]))
    return 0


def _fit(recipe: Recipe, gpu_gib: float | None) -> list[str]:
    """Return settings that fit the machine."""
    from lockstep.plan.preview import Preview
    from lockstep.plan.proposal import fit_lines

    preview = Preview.of(recipe, gpu_gib)
    return ["the model is not known here"] if preview is None else fit_lines(preview)


def _time(recipe: Recipe, *, measure: bool) -> list[str]:
    """Return the time of a step and of the run as measured now or before."""
    from lockstep.loops.timing import measure_timing, stored_timing, timing_lines

    timing = measure_timing(recipe) if measure else stored_timing(recipe)
    if timing is None:
        return ["not measured on this machine yet: `lockstep plan RECIPE --time` does it in seconds"]
    return timing_lines(timing, recipe)


def _with_steps(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe with the steps that its epochs mean, where its rows can be read; else a line that says why not."""
    epochs = recipe.epochs if recipe.sft is None else recipe.sft.epochs
    if epochs is None:
        return recipe, []
    from lockstep.errors import ConfigError, DataError, RunDirectoryError
    from lockstep.loops.preflight import with_known_steps

    try:
        return with_known_steps(recipe), []
    except (ConfigError, DataError, RunDirectoryError) as error:
        line = f"the steps of {epochs:g} epochs are not known here ({error}); {recipe.steps} stand in for them below"
        return recipe, [line, ""]


def plan_text(recipe: Recipe) -> list[str]:
    """Return all sections that have something to say, with their headings."""
    lines = [f"{recipe.name}: {recipe.loop}, task {recipe.task.kind}, {recipe.steps} steps"]
    for title, found in sections(recipe):
        lines += ["", title, *(f"  {line}" for line in found)] if found else []
    return lines


def sections(recipe: Recipe) -> list[tuple[str, list[str]]]:
    """Return headings and what is printed under each, in order. To add one: a function from a recipe to lines, an entry here."""
    from lockstep.algorithms.build import build_objective
    from lockstep.evaluation.plan import plan_lines
    from lockstep.health.rules import health_lines
    from lockstep.plan.batch import batch_lines, checkpoint_lines, placement_lines, rate_lines
    from lockstep.plan.epochs import seen_lines
    from lockstep.plan.preview import adapter_lines

    return [
        ("Batch", [*batch_lines(recipe), *placement_lines(recipe), *seen_lines(recipe)]),
        ("Objective", build_objective(recipe).formula.splitlines()),
        ("Adapter", adapter_lines(recipe)),
        ("Learning rate", rate_lines(recipe)),
        ("Evaluations and checkpoints", [*plan_lines(recipe), *checkpoint_lines(recipe)]),
        ("Health", health_lines(recipe)),
    ]


def _memory(recipe: Recipe, gpu_gib: float | None, *, refused: bool) -> list[str]:
    from lockstep.errors import ModelError
    from lockstep.plan.preview import preview_lines

    try:
        return preview_lines(recipe, gpu_gib)
    except ModelError:
        if refused:  # for this reason among others
            return ["no plan: see the refusals"]
        raise
