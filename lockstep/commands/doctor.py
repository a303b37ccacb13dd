"""`lockstep doctor`: checks whether this machine is fit for a run, and whether a recipe would start. Lists all problems.

With a recipe it opens the data, tries the grader and counts the items, as the start of a run does; no weights are loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lockstep.commands.plan import add_allow, load_allowed
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe
    from lockstep.doctor.check import Check, Checking

MARKS = {"ok": "all is well", "warn": "it works, but worse than it could", "fail": "a run would end in an error"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `doctor [RECIPE...]`."""
    parser = subparsers.add_parser("doctor", help="would this recipe start here? opens data and grader, no weights")
    parser.add_argument(
        "recipe", nargs="*", metavar="RECIPE|a.b=c", help="recipe files and overrides; none checks the machine alone"
    )
    parser.add_argument(
        "--would-install",
        nargs="+",
        default=[],
        metavar="EXTRA|REQUIREMENT",
        help="say what pip would change, without changing it; fails if it takes torch or the like to an older version",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="try the GPU: attention, a captured step, the allocator, vLLM"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CHECK", help="these checks of environment and machine alone"
    )
    add_allow(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Print a line a check. Returns 1 if one failed, else 0. Raises ConfigError for a recipe with mistakes."""
    recipe = load_allowed(args) if args.recipe else None
    from lockstep.doctor.check import lines, worst

    found = []
    for check in _checks(args, recipe):
        found.append(check)
        if not args.json:
            print("\n".join(lines(check)), flush=True)
    verdict = worst(found)
    if args.json:
        print(json.dumps({"verdict": verdict, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        counts = ", ".join(f"{sum(c.verdict == v for c in found)} {v}" for v in MARKS)
        start = f"; `lockstep train` would {'not ' if verdict == 'fail' else ''}start" if recipe is not None else ""
        print(f"\n{counts}: {MARKS[verdict]}{start}")
    return int(verdict == "fail")


def _checks(args: argparse.Namespace, recipe: Recipe | None) -> Iterator[Check]:
    """Make the checks that were asked for. Where a package cannot be imported, only those that need none."""
    from lockstep.doctor.check import perform, worst
    from lockstep.doctor.imports import environment_checks

    if args.would_install:
        from lockstep.doctor.install import would_install

        yield from would_install(args.would_install)
        return
    if args.gpu:
        from lockstep.doctor.exercise import exercises

        yield from perform(exercises(gpu=True))
        return
    if args.only:
        from lockstep.doctor.machine import machine_checks

        yield from perform(named(args.only, [*environment_checks(), *machine_checks()]))
        return
    first = list(perform(environment_checks()))
    yield from first
    if worst(check for check in first if check.name == "imports") == "fail":
        from lockstep.doctor.machine import machine_checks

        yield from perform(machine_checks())
        return
    from lockstep.doctor.run import doctor

    yield from doctor(recipe)
    if recipe is not None:
        from lockstep.loops.preflight import start_checks

        yield from start_checks(recipe)


def named(names: Sequence[str], checks: Sequence[tuple[str, Checking]]) -> list[tuple[str, Checking]]:
    """Return the checks of these names. Raises ConfigError for a name that none has."""
    known = [name for name, _ in checks]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError([f"--only: there is no check {unknown[0]!r}"], fix=f"choose from {', '.join(known)}")
    return [one for one in checks if one[0] in names]
