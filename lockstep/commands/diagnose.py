"""`lockstep diagnose`: shows what the health rules, the spike log and the playbook say about a run, and what to do."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.load import load
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe
    from lockstep.track.writer import StepRecord

DECADE = 10
SHOWN = 5
"""Spikes that are printed, those with the largest gradient norm."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `diagnose RUN [health.x=y...]`."""
    parser = subparsers.add_parser(
        "diagnose", help="what the rules of health, the spikes and the playbook say of a run, and what to do"
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory, finished or under way")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="health.a=b",
        help="other rules than the run had, or a file of them. Example: health.clipping.limit=50",
    )


def run(args: argparse.Namespace) -> int:
    """Print what is found, with evidence and remedy. Returns 3 if a rule would have stopped the run, else 0."""
    if others := [one for one in args.settings if not one.startswith("health.") and not Path(one).is_file()]:
        raise ConfigError([f"{others[0]}: only settings of health can be changed here, because the run exists already"])
    from lockstep.track.rundir import RunDirectory
    from lockstep.track.writer import read_metrics

    directory = RunDirectory.open(args.run)
    recipe = load([str(directory.recipe_path), *args.settings])
    rows = [row for row in read_metrics(directory) if row.step]
    stopped = _print_rules(recipe, rows)
    _print_spikes(directory.spikes_path)
    _print_playbook(rows)
    if stopped:
        print(f"\nof {recipe.steps} steps the run ends after step {stopped}, {len(rows)} are recorded")
    else:
        print(f"\nno rule stops this run; {len(rows)} of {recipe.steps} steps are recorded")
    return 3 if stopped else 0


def _print_rules(recipe: Recipe, rows: Sequence[StepRecord]) -> int:
    """Print each broken rule once, and the table of the first steps. Returns the step that ends the run, 0 if none does."""
    from lockstep.health.judge import HealthJudge
    from lockstep.health.smoke import COLUMNS, SmokeGate
    from lockstep.track.text import plain_table

    judge, smoke, broken, stopped = HealthJudge(recipe), SmokeGate(recipe), set[str](), 0
    for row in rows:
        alarms = judge.step(row.step, row.metrics)
        smoke.take(row.step, row.metrics, alarms)
        if table := smoke.due(row.step):
            print(plain_table(f"smoke gate: the first {row.step} steps", COLUMNS, table) + "\n")
        for alarm in alarms:
            if alarm.rule.name in broken:
                continue  # a rule that stops speaks at every step
            print(f"step {row.step}, {alarm.setting.tier}: {alarm.what}{alarm.to_do}")
            if alarm.setting.tier == "stop" and row.step < recipe.steps:
                stopped = stopped or row.step
        broken = {alarm.rule.name for alarm in alarms if alarm.setting.tier == "stop"}
    return stopped


def _print_spikes(path: Path) -> None:
    """Print the largest spikes and, by ten steps, how many there were, by which cause."""
    from lockstep.track.jsonl import number, read_jsonl

    spikes = list({(one["step"], one["update"]): one for one in read_jsonl(path)}.values())  # a resume repeats steps
    if not spikes:
        return
    decades: dict[int, list[str]] = defaultdict(list)
    for spike in spikes:
        decades[(int(spike["step"]) - 1) // DECADE].append(str(spike["cause"]))
    print(f"\nspikes: {len(spikes)} in {path.name}")
    for decade, causes in sorted(decades.items()):
        counted = ", ".join(f"{causes.count(cause)} by {cause}" for cause in sorted(set(causes)))
        print(f"  steps {decade * DECADE + 1} to {decade * DECADE + DECADE}: {len(causes)} ({counted})")
    for spike in sorted(spikes, key=lambda one: -number(one["grad_norm"]))[:SHOWN]:
        first = spike["rows"][0]
        print(
            f"  step {spike['step']}: gradient norm {number(spike['grad_norm']):.4g}, row {first['id']}, sample "
            f"{first['sample']}; cause: {spike['cause']}, {first['why']}"
        )


def _print_playbook(rows: Sequence[StepRecord]) -> None:
    """Print the entries of the playbook that the steps point to, in its order."""
    from lockstep.health.playbook import findings

    if found := findings([row.metrics for row in rows]):
        print("\nplaybook, in the order to look:")
    for one in found:
        print(f"  {one.entry.name}: {'; '.join(one.evidence)}\n    to do: {one.entry.action}")
