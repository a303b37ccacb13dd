"""`lockstep train`: run a recipe, or continue a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.load import load
from lockstep.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `train`."""
    parser = subparsers.add_parser("train", help="train a recipe, or continue a run")
    parser.add_argument(
        "recipe",
        nargs="*",
        metavar="RECIPE|a.b=c",
        help="recipe files and overrides; later ones win. With --resume only settings of health: health.clipping=off",
    )
    parser.add_argument(
        "--resume", metavar="RUN", type=Path, help="continue this run directory from its last checkpoint"
    )
    parser.add_argument(
        "--allow-fallback",
        action="store_true",
        help="with --resume: if the newest checkpoint is damaged, use an older one",
    )


def run(args: argparse.Namespace) -> int:
    """Train. Raises LockstepError: 2 for a wrong recipe, 3 if the run stopped itself, 75 if it was interrupted and saved."""
    if args.resume is not None:
        if others := [arg for arg in args.recipe if not arg.startswith("health.")]:
            raise ConfigError(
                [f"{others[0]}: a resumed run keeps its own recipe; only settings of health may change"],
                fix="start a new run to change a setting, or leave the argument out",
            )
        from lockstep.loops.start import resume_run

        resume_run(args.resume, args.recipe, allow_fallback=args.allow_fallback)
        return 0
    if args.allow_fallback:
        raise ConfigError(["--allow-fallback is of a resume"], fix="name the run with --resume, or leave it out")
    if not args.recipe:
        raise ConfigError(["no recipe was given"], fix="lockstep train recipes/quickstart.yaml, or --resume runs/NAME")
    recipe = load(args.recipe)  # before anything heavy: a mistake is refused in milliseconds
    from lockstep.loops.start import start_run

    start_run(recipe)
    return 0
