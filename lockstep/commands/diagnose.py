"""`lockstep diagnose`: shows what the health rules, the spike log and the playbook say about a run, and what to do."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.load import load
from lockstep.errors import ConfigError, RunDirectoryError

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
    from lockstep.health.playbook import findings
    from lockstep.track.jsonl import read_jsonl
    from lockstep.track.rundir import RunDirectory
    from lockstep.track.writer import read_metrics

    directory = RunDirectory.open(args.run)
    mine, recipe = (load([str(directory.recipe_path), *more]) for more in ((), args.settings))
    if recipe.model_copy(update={"health": mine.health}) != mine:
        what = f"{' '.join(args.settings)}: only settings of health can be changed here, because the run exists already"
        raise ConfigError([what], fix="give a file that has the section health alone")
    rows = [row for row in read_metrics(directory) if row.step]
    stopped = _print_rules(recipe, rows)
    path = directory.spikes_path
    try:
        print("\n".join(_spike_lines(read_jsonl(path), path.name)), end="")
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        fix = "restore the file from a backup, or move it away to go on without it"
        raise RunDirectoryError(f"a line is not a spike: {error!r}", where=str(path), fix=fix) from error
    if entries := findings([row.metrics for row in rows]):
        print("\nplaybook, in the order to look:")
    for one in entries:
        print(f"  {one.entry.name}: {'; '.join(one.evidence)}\n    to do: {one.entry.action}")
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


def _spike_lines(found: Sequence[dict[str, Any]], file: str) -> list[str]:
    """Return how many spikes there were by ten steps, by which cause, and the largest; "" ends the lines."""
    from lockstep.track.jsonl import number
    from lockstep.track.text import one_line

    spikes = list({(one["step"], one["update"]): one for one in found}.values())  # a resume repeats steps
    if not spikes:
        return []
    decades: dict[int, list[str]] = defaultdict(list)
    for spike in spikes:
        decades[(int(spike["step"]) - 1) // DECADE].append(str(spike["cause"]))
    lines = [f"\nspikes: {len(spikes)} in {file}"]
    for decade, causes in sorted(decades.items()):
        counted = ", ".join(f"{causes.count(cause)} by {cause}" for cause in sorted(set(causes)))
        lines.append(f"  steps {decade * DECADE + 1} to {decade * DECADE + DECADE}: {len(causes)} ({counted})")
    sizes = [(math.isnan(norm := number(one["grad_norm"])), norm) for one in spikes]  # NaN is the largest
    for (_, norm), spike in sorted(zip(sizes, spikes, strict=True), key=itemgetter(0), reverse=True)[:SHOWN]:
        first = spike["rows"][0]
        what = f"step {spike['step']}: gradient norm {norm:.4g}, row {first['id']}, sample {first['sample']}"
        lines.append("  " + one_line(f"{what}; cause: {spike['cause']}, {first['why']}"))
    return [*lines, ""]
