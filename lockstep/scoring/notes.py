"""Writes a run's entry into the notes file of its folder: recorded facts, with room for the user's conclusions."""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import fmean

from lockstep.errors import EvaluationError, RunDirectoryError
from lockstep.evaluation.collect import base_and_last, records_of
from lockstep.evaluation.table import row_of, table_lines
from lockstep.track.files import read_plain, write_atomic
from lockstep.track.rundir import RunDirectory
from lockstep.track.state import state_of
from lockstep.track.text import plain_table
from lockstep.track.writer import StepRecord, read_events, read_metrics

FILE = "NOTES.md"
STRETCH = 10
"""Steps of a row of a table."""
COLUMNS = ("reward/mean", "validation/loss", "length/mean", "grad/norm", "kl/k1")
TROUBLE = ("warning", "health")
"""Kinds of events that are counted."""


def write_note(run: RunDirectory) -> Path:
    """Add the run's entry to NOTES.md beside it, or fill it in again: text outside of the markers is yours and stays.

    Raises RunDirectoryError if that file is not UTF-8.
    """
    path = run.path.parent / FILE
    begin, end = f"<!-- {run.name}: filled in -->", f"<!-- {run.name}: yours below -->"
    block = "\n".join([begin, *entry(run), end])
    with ExitStack() as after:
        folder = os.open(path.parent, os.O_RDONLY)
        after.callback(os.close, folder)
        with suppress(OSError):  # a network's file system may have no locks of folders
            fcntl.flock(folder, fcntl.LOCK_EX)  # another command may be writing its entry
        try:
            text = read_plain(path).decode()
        except FileNotFoundError:
            text = "# Notes\n"
        except UnicodeDecodeError as error:
            raise RunDirectoryError(
                f"the notes are not UTF-8 at byte {error.start}", where=str(path), fix="save the file as UTF-8"
            ) from error
        filled = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if filled.search(text):
            text = filled.sub(lambda _: block, text, count=1)
        else:
            text += f"\n## {run.name}\n\n{block}\n\nLearnt: \n"
        write_atomic(path, text)
    return path


def entry(run: RunDirectory) -> list[str]:
    """Return the lines of a run: how it was made and ended, its table by stretches of steps, its scores."""
    manifest, rows, state = run.manifest(), read_metrics(run), state_of(run)
    project = manifest.get("project") or {}
    commit = project.get("commit")
    branch = f" on {project['branch']}" if project.get("branch") else ""
    changed = f", {project['changed_files']} files changed" if commit and project.get("changed_files") else ""
    lines = [
        f"- began {manifest.get('time', 'at an unknown time')}, {state.name}"
        + (f": {state.reason.splitlines()[0]}" if state.reason else ""),
        f"- command: `{' '.join(manifest.get('command') or ['?'])}`",
        f"- your code: {commit[:12] + branch + changed if commit else 'in no git repository'}",
        "",
        "```",
        *stretches(rows, [event.step or 0 for event in read_events(run) if event.kind in TROUBLE]),
        "```",
    ]
    return [*lines, "", "```", *_scores(run, rows), "```"]


def summary(run: RunDirectory) -> str:
    """Return one line for a commit. Example: "sums-3: finished, reward 0.31 → 0.58 in 60 steps" """
    rows = [row for row in read_metrics(run) if "reward/mean" in row.metrics]
    rewards = [row.metrics["reward/mean"] for row in rows]
    rise = (
        f", reward {fmean(rewards[:STRETCH]):.3g} → {fmean(rewards[-STRETCH:]):.3g} in {rows[-1].step} steps"
        if rows
        else ""
    )
    return f"{run.name}: {state_of(run).name}{rise}"


def stretches(rows: Sequence[StepRecord], warned: Sequence[int]) -> list[str]:
    """Return a table of means by ten steps, with the number of warnings in each."""
    names, means = means_by_stretch([rows], COLUMNS)
    warnings = Counter((step - 1) // STRETCH for step in warned)
    table = [[*cells, str(warnings[number])] for number, cells in enumerate(means)]
    return plain_table("", ["steps", *names, "warnings"], table).split("\n")


def means_by_stretch(runs: Sequence[Sequence[StepRecord]], wanted: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the wanted metrics that a run has, and a row for each stretch: its steps, and each metric's mean in each run."""
    names = [name for name in wanted if any(name in row.metrics for rows in runs for row in rows)]
    last = max((row.step for rows in runs for row in rows), default=0)
    table = []
    for start in range(1, last + 1, STRETCH):
        steps = range(start, min(start + STRETCH, last + 1))
        cells = [f"{steps[0]}-{steps[-1]}"]
        for name in names:
            for rows in runs:
                values = [row.metrics[name] for row in rows if row.step in steps and name in row.metrics]
                cells.append(f"{fmean(values):.4g}" if values else "")
        table.append(cells)
    return names, table


def _scores(run: RunDirectory, rows: Sequence[StepRecord]) -> list[str]:
    """Return the base against the last scores, and a remark if rewards rose and scores did not."""
    try:
        pairs = base_and_last(records_of(str(run.path)))
        compared = [row_of(one.before.brief, one.after.brief) for one in pairs]
    except EvaluationError as error:
        return [f"no comparison of scores: {error.what}"]
    rewards = [row.metrics["reward/mean"] for row in rows if "reward/mean" in row.metrics]
    rise = fmean(rewards[-STRETCH:]) - fmean(rewards[:STRETCH]) if len(rewards) > 2 * STRETCH else 0.0
    flat = all(row.comparison.difference <= 0 for row in compared)
    remark = (
        f"rewards rose by {rise:.3g}, no score did: look for what the grader rewards" if rise > 0.05 and flat else ""
    )
    return [*table_lines(compared), *([remark] if remark else [])]
