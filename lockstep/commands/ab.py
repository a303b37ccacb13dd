"""`lockstep ab`: trains two runs that differ in exactly one setting, one after the other, and reports their paired comparison."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.load import load, load_run
from lockstep.config.schema import Recipe
from lockstep.errors import ConfigError, DataError, EvaluationError, RunDirectoryError

if TYPE_CHECKING:
    from lockstep.track.rundir import RunDirectory

OWN = ("name", "runs_dir", "track")
"""Settings that change no number of a run."""
SHOWN = ("reward/mean", "validation/loss", "length/mean", "grad/norm")
"""Metrics whose means are compared."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `ab BASE --set a.b=v`."""
    parser = subparsers.add_parser("ab", help="train two runs that differ in one setting, and compare them")
    parser.add_argument(
        "base", nargs="+", metavar="RECIPE|a.b=c", help="recipe files and overrides that both runs share"
    )
    parser.add_argument("--set", action="append", required=True, metavar="a.b=v", help="what run B changes")
    parser.add_argument("--multi", action="store_true", help="let B differ in several settings")
    parser.add_argument("--name", metavar="NAME", help="the runs are NAME-a and NAME-b (default: the recipe's name)")


def run(args: argparse.Namespace) -> int:
    """Train A, then B, and report. A run that is there already is continued, or read if it is finished.

    Raises ConfigError unless exactly one setting differs; DataError if the two were not asked the same questions.
    """
    from lockstep.models.cache import sha256_of

    a, b, changes = pair_of(args.base, args.set, multi=args.multi, name=args.name)
    print("\n".join([f"A: {a.name}", f"B: {b.name}", *(f"  {line}" for line in changes), ""]), flush=True)
    first = finished_run(a)
    now = {path: sha256_of(Path(path)) for path in _sources(first) if Path(path).is_file()}
    require_same_files(first, now)  # before B costs its time
    runs = (first, finished_run(b))
    lines = [f"A/B: {a.name} against {b.name}", *changes, *require_same_questions(*runs), "", *report(*runs)]
    path = Path(a.runs_dir) / f"{b.name.removesuffix('-b')}-ab.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(["", *lines, "", f"report: {path}"]))
    return 0


def pair_of(
    base: Sequence[str], changed: Sequence[str], *, multi: bool, name: str | None
) -> tuple[Recipe, Recipe, list[str]]:
    """Return both recipes and a line per setting that differs.

    Raises ConfigError if none does, or several without `multi`; and if the seed does, for then chance alone makes a difference.
    """
    named = [f"name={name}"] if name else []
    recipe = load_run([*base, *named])
    other = load_run([*base, *named, *changed])
    differing = list(differences(recipe.model_dump(mode="json"), other.model_dump(mode="json")))
    lines = [f"{path}: {before} → {after}" for path, before, after in differing]
    paths = [path for path, _, _ in differing]
    if not paths:
        raise ConfigError(
            [f"--set {' '.join(changed)}: both runs would be the same"],
            fix="give a value that the recipe does not have",
        )
    if own := [path for path in paths if path.split(".")[0] in OWN]:
        raise ConfigError(
            [f"--set {own[0]} is not allowed: this setting has no effect on the results of a run"],
            fix="set the names of the runs with --name",
        )
    if "seed" in paths:
        raise ConfigError(
            ["--set seed is not allowed: both runs of an A/B test use the same seed"],
            fix="to compare two seeds, train two runs, then use lockstep compare",
        )
    if len(paths) > 1 and not multi:
        what = f"{len(paths)} settings differ, but an A/B test changes only one: {'; '.join(lines[:6])}"
        raise ConfigError([what], fix="change one, or pass --multi (the report then cannot say which setting mattered)")
    return (
        recipe.model_copy(update={"name": f"{recipe.name}-a"}),
        other.model_copy(update={"name": f"{recipe.name}-b"}),
        lines,
    )


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value before and value after of every setting that differs."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in {**before, **after}:
            inner = f"{path}.{name}" if path else name
            yield from differences(before.get(name), after.get(name), inner)
    elif before != after:
        yield path, before, after


def finished_run(recipe: Recipe) -> RunDirectory:
    """Return the finished run of a recipe: read, continued or made. Raises RunDirectoryError for a run of another recipe."""
    from lockstep.build.opponents import pinned_opponents
    from lockstep.build.warm_start import pinned
    from lockstep.loops.preflight import with_known_steps
    from lockstep.loops.start import resume_run, start_run
    from lockstep.run.state import recipe_hash
    from lockstep.track.rundir import RunDirectory, is_run, never_began
    from lockstep.track.state import state_of

    path = Path(recipe.runs_dir) / recipe.name
    if not is_run(path) or never_began(path):
        return start_run(recipe)
    found = RunDirectory.open(path)
    wanted = with_known_steps(pinned_opponents(pinned(recipe)))
    if recipe_hash(load([str(found.recipe_path)])) != recipe_hash(wanted):
        raise RunDirectoryError(
            "a run of a different recipe already exists", where=str(path), fix="choose another name: --name NAME"
        )
    return found if state_of(found).name == "finished" else resume_run(path)


def require_same_questions(a: RunDirectory, b: RunDirectory) -> list[str]:
    """Return lines on what both share. Raises DataError if they were trained or scored on other questions or graded otherwise."""
    one, other = a.manifest(), b.manifest()
    lines: list[str] = []
    for name, what in (("questions_hash", "training questions"), ("heldout_hash", "held-out questions")):
        if one.get(name) != other.get(name):
            raise DataError(
                f"the changed setting gives the two runs different {what} ({one.get(name)} and {other.get(name)})",
                where=f"{a.path} and {b.path}",
                fix=f"compare the runs with: lockstep compare {a.path} {b.path} --allow-mismatch",
            )
        lines += [f"same {what} ({str(one[name])[:8]})"] if one.get(name) else []
    require_same_files(a, _sources(b))
    count = len(_sources(a))
    return [*lines, f"same {count} files of yours"] if count else lines


def require_same_files(a: RunDirectory, other: Mapping[str, str]) -> None:
    """Raise DataError if a file of yours that run A used has another content. `other`: hashes by path."""
    mine = _sources(a)
    if changed := sorted(path for path in mine.keys() & other.keys() if mine[path] != other[path]):
        raise DataError(
            f"the file has changed since run {a.name} used it",
            where=changed[0],
            fix=f"restore it (a copy is in {a.path / 'code'}), or train the pair under another name: --name NAME",
        )


def _sources(run: RunDirectory) -> dict[str, str]:
    return {one["path"]: one["sha256"] for one in run.manifest().get("sources", [])}


def report(a: RunDirectory, b: RunDirectory) -> list[str]:
    """Return the tables: metrics by stretches of steps, and the last scores item by item."""
    from lockstep.commands.compare import compare_pair, find_pairs, lines_of
    from lockstep.scoring.notes import means_by_stretch
    from lockstep.track.text import plain_table
    from lockstep.track.writer import read_metrics

    names, table = means_by_stretch([read_metrics(run) for run in (a, b)], SHOWN)
    columns = ["steps", *(f"{name} {side}" for name in names for side in "AB")]
    lines = plain_table("means over steps", columns, table).split("\n")
    try:
        pairs, _ = find_pairs([str(a.path), str(b.path)])
        for pair in pairs:  # the setting may be one that scores are measured under: their lines say so
            lines += ["", *lines_of(pair, compare_pair(pair, True, None), items=False)]
    except EvaluationError as error:
        return [*lines, "", f"no scores to compare: {error.what}"]
    return lines
