"""`lockstep track`: shows the trackers of a run or recipe, and sends them the steps that they lack."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `track doctor` and `track sync`."""
    parser = subparsers.add_parser("track", help="look at the trackers of a run, or send what they miss")
    actions = parser.add_subparsers(dest="track_action", metavar="ACTION", required=True)
    doctor = actions.add_parser("doctor", help="package, key, network, project and files of each tracker")
    doctor.add_argument(
        "target", nargs="+", metavar="RUN|RECIPE|a.b=c", help="a run directory, or a recipe and overrides"
    )
    sync = actions.add_parser("sync", help="send the steps that trackers miss")
    sync.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run directory")
    sync.add_argument("--tracker", metavar="NAME", help="this tracker alone")


def run(args: argparse.Namespace) -> int:
    """Print what was found or sent. Returns 1 if a check failed, or a tracker did not take everything."""
    from lockstep.config.load import load
    from lockstep.track.rundir import RunDirectory, is_run
    from lockstep.track.sync import findings, sync

    if args.track_action == "sync":
        well = True
        for path in args.runs:
            recipe = load([str(RunDirectory.open(path).recipe_path)])
            if not recipe.track.sinks:
                print(f"{path}: no tracker (track.sinks)")
            for right, line in sync(path, recipe, args.tracker):
                print(f"{path}: {line}", flush=True)
                well = well and right
        if not well:
            print("nothing is lost: see `lockstep track doctor RUN`; the same command sends the rest")
        return int(not well)
    first = Path(args.target[0])
    path = first if is_run(first) else None
    words = [str(first / "recipe.yaml"), *args.target[1:]] if path else args.target
    rows = findings(load(words), path)
    for verdict, what, text in rows:
        print(f"{verdict:4}  {what:20}  {text}")
    return int(any(verdict == "fail" for verdict, _, _ in rows))
