"""`lockstep diagnose`: what the rules of health say of a run's recorded metrics, and what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.load import load
from lockstep.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `diagnose RUN [health.x=y...]`."""
    parser = subparsers.add_parser("diagnose", help="what the rules of health say of a run, and what to do")
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory, finished or under way")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="health.a=b",
        help="other rules than the run had. Example: health.clipping.limit=50",
    )


def run(args: argparse.Namespace) -> int:
    """Print each broken rule with its evidence. Returns 3 if one would have stopped the run, else 0."""
    if others := [setting for setting in args.settings if not setting.startswith("health.")]:
        raise ConfigError([f"{others[0]}: only settings of health can be tried on a run that is there"])
    from lockstep.health.judge import HealthJudge
    from lockstep.track.rundir import RunDirectory
    from lockstep.track.writer import read_metrics

    directory = RunDirectory.open(args.run)
    recipe = load([str(directory.recipe_path), *args.settings])
    rows = [row for row in read_metrics(directory) if row.step]
    judge, broken, stopped = HealthJudge(recipe), set[str](), 0
    for row in rows:
        alarms = judge.step(row.step, row.metrics)
        for alarm in alarms:
            if alarm.rule.name in broken:
                continue  # a rule that stops speaks at every step
            stops = alarm.setting.tier == "stop"
            print(f"step {row.step}, {alarm.setting.tier}: {alarm.what}\n  to do: {alarm.rule.advice}")
            if stops and row.step < recipe.steps:
                stopped = stopped or row.step
        broken = {alarm.rule.name for alarm in alarms if alarm.setting.tier == "stop"}
    if stopped:
        print(f"\nof {recipe.steps} steps the run ends after step {stopped}, {len(rows)} are recorded")
    else:
        print(f"\nno rule stops this run; {len(rows)} of {recipe.steps} steps are recorded")
    return 3 if stopped else 0
