"""`lockstep train`: runs a recipe, or continues a run."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.cluster.child import started_ahead
from lockstep.commands.plan import add_allow, load_allowed
from lockstep.config.load import load, use_paths
from lockstep.errors import ConfigError
from lockstep.track.provenance import require_clean
from lockstep.track.rundir import RunDirectory, is_run, never_began, refuse_taken
from lockstep.track.writer import read_events

MAY_CHANGE = ("health.", "track.", "placement", "optimizer.offload=")
"""Beginnings of the settings that a resume may change: they are in no result."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `train`."""
    parser = subparsers.add_parser("train", help="train a recipe, or continue a run")
    parser.add_argument(
        "recipe",
        nargs="*",
        metavar="RECIPE|a.b=c",
        help="recipe files and overrides; later ones win. With --resume only settings of health, track and placement, "
        "and optimizer.offload: health.clipping=off",
    )
    parser.add_argument(
        "--resume", metavar="RUN", type=Path, help="continue this run directory from its last checkpoint"
    )
    add_allow(parser)
    parser.add_argument(
        "--allow-fallback",
        action="store_true",
        help="with --resume: if the newest checkpoint is damaged, use an older one",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="with --resume: end at step N, beyond the one that the run was started with",
    )
    parser.add_argument(
        "--require-clean",
        action="store_true",
        help="refuse to start unless everything in your git repository is committed (runs_dir apart)",
    )


def _instead(argument: str, resumed: Path) -> str:
    """Return what to write in place of a setting that a resumed run does not take."""
    if re.fullmatch(r"steps=\d+", argument):
        return f"for a longer run write --{argument.replace('=', ' ')}"
    return f"leave the argument out; or train the last weights further in a new run: warm_start={resumed} name=NAME"


def run(args: argparse.Namespace) -> int:
    """Train. Raises LockstepError: 2 for a wrong recipe, 3 if the run stopped itself, 75 if it was interrupted and saved."""
    if args.resume is not None:
        if others := [arg for arg in args.recipe if not arg.startswith(MAY_CHANGE)]:
            raise ConfigError(
                [
                    f"{others[0]}: a resumed run keeps its own recipe; only settings of health, track and placement, "
                    "and optimizer.offload, may change"
                ],
                fix=_instead(others[0], args.resume),
            )
        if args.steps is None and (done := finished(args.resume)):
            print(done)
            return 0
        recipe = load([str(RunDirectory.open(args.resume).recipe_path), *args.recipe])
        use_paths(recipe)
        print(f"continuing {args.resume}; loading", flush=True)
        with _remedy(args.resume), started_ahead(recipe.started):
            from lockstep.loops.start import resume_run

            resume_run(args.resume, args.recipe, allow=args.allow, allow_fallback=args.allow_fallback, steps=args.steps)
        return 0
    if args.allow_fallback:
        raise ConfigError(
            ["--allow-fallback works only with --resume"],
            fix="give the run with --resume, or leave --allow-fallback out",
        )
    if args.steps is not None:
        raise ConfigError(["--steps works only with --resume"], fix=f"for a new run, write steps={args.steps}")
    if not args.recipe:
        raise ConfigError(
            ["no recipe was given"],
            fix="give one, such as recipes/quickstart.yaml, or continue a run: --resume runs/NAME",
        )
    recipe = load_allowed(args)  # before anything heavy: a mistake is refused in milliseconds
    path = Path(recipe.runs_dir) / recipe.name
    refuse_taken(path)
    if args.require_clean:
        require_clean(Path.cwd(), recipe.runs_dir)
    print(
        f"{recipe.name}: {recipe.loop}, task {recipe.task.kind}, {recipe.steps} steps, in {path}; loading", flush=True
    )
    with _remedy(path), started_ahead(recipe.started):
        from lockstep.loops.start import start_run

        start_run(recipe)
    return 0


def finished(path: Path) -> str:
    """Message about a run that has nothing left to do; "" for one that can go on."""
    run = RunDirectory.open(path)
    last = next((event for event in reversed(read_events(run)) if event.kind in ("finished", "start", "resume")), None)
    if last is None or last.kind != "finished":
        return ""
    return (
        f"{path} is finished: step {last.step}, report in {run.report_path}\n"
        f"  to make it longer: lockstep train --resume {path} --steps N\n"
        f"  to train its weights in a new run: lockstep train RECIPE warm_start={path} name=NAME"
    )


@contextmanager
def _remedy(path: Path) -> Iterator[None]:
    """Say on Ctrl-C outside of the loop, which saves by itself, what is left and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        again = "start it again with the same command" if never_began(path) or not is_run(path) else ""
        print(f"\nnothing was lost; {again or f'lockstep train --resume {path}'}", file=sys.stderr)
        raise
