"""`lockstep doctor`: is this machine fit for a run, and would this recipe start? Every problem at once, each with its fix.

With a recipe it opens the data, tries the grader and counts the items, as the start of a run does; no weights are loaded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import chain

from lockstep.config.load import load_run

MARKS = {"ok": "all is well", "warn": "it works, but worse than it could", "fail": "a run would end in an error"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `doctor [RECIPE...]`."""
    parser = subparsers.add_parser("doctor", help="would this recipe start here? opens data and grader, no weights")
    parser.add_argument(
        "recipe", nargs="*", metavar="RECIPE|a.b=c", help="recipe files and overrides; none checks the machine alone"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Print a line a check. Returns 1 if one failed, else 0. Raises ConfigError for a recipe with mistakes."""
    recipe = load_run(args.recipe) if args.recipe else None
    from lockstep.doctor.check import lines, worst
    from lockstep.doctor.run import doctor

    found = []
    checks = doctor(recipe)
    if recipe is not None:
        from lockstep.loops.preflight import start_checks

        checks = chain(checks, start_checks(recipe))
    for check in checks:
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
