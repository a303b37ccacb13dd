"""`lockstep reproduce`: repeats a published run: counts its data, trains, evaluates, and shows both sets of figures together."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.expects import Count, Figure, expects_of
from lockstep.config.load import load_run
from lockstep.errors import ConfigError, DataError, LockstepError, ModelError

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe
    from lockstep.track.rundir import RunDirectory

HEAD = "| what | published | here | verdict | source |\n|---|---|---|---|---|"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `reproduce RECIPE`."""
    parser = subparsers.add_parser(
        "reproduce", help="train a published run, and write its figures beside the published ones"
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="recipe file with NAME.expects.yml beside it")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that differ from the published run")
    parser.add_argument("--counts-only", action="store_true", help="count rows and compare; train nothing")


def run(args: argparse.Namespace) -> int:
    """Count, train, compare. Raises DataError or ModelError that says what is missing, 7 if a count is not the published one."""
    if args.recipe.suffix not in (".yaml", ".yml"):
        raise ConfigError([f"{args.recipe}: not a recipe file"], fix="give a .yaml file, such as one of recipes/tasks")
    expects = expects_of(args.recipe)
    recipe = load_run([str(args.recipe), *args.overrides])
    _check_scores(recipe, expects.figures)
    rows = list(_counted(recipe, expects.counts))
    print("\n".join([HEAD, *rows]), flush=True)
    if any("| differs |" in row for row in rows):
        print("a count differs: the run is not the published one")
        return 7
    if args.counts_only:
        return 0
    from lockstep.commands.ab import finished_run
    from lockstep.models.resolve import resolve

    try:
        resolve(recipe.model)
    except ModelError as error:
        fix = f"{error.fix}; then run the same command again (the data are complete)"
        raise ModelError(error.what, where=error.where, fix=fix) from None
    found = finished_run(recipe)
    lines = [HEAD, *rows, *_figures(found, expects.figures), "", *_paired(found)]
    if args.overrides:
        lines += ["", f"With other settings than the published run's: {' '.join(args.overrides)}"]
    path = found.path / "reproduce.md"
    path.write_text("\n".join([f"# {recipe.name}", "", *lines]) + "\n", encoding="utf-8")
    print("\n".join(["", *lines, "", f"written to {path}"]))
    return 0


def _check_scores(recipe: Recipe, figures: Sequence[Figure]) -> None:
    """Raise ConfigError, before hours of training, for a figure of which the run would have no score."""
    names = (
        [*recipe.eval.scores, *(f"lm_eval.{one.name}" for one in recipe.eval.lm_eval)] if recipe.eval.enabled else []
    )
    for one in figures:
        if one.mode not in names:
            there = f"there are {', '.join(names)}" if names else "its evaluations are off"
            raise ConfigError([f"figures: the run has no score {one.mode}; {there}"])
        if one.score == "base" and not recipe.eval.at_start:
            raise ConfigError([f"figures: the run has no score {one.mode} of the base: eval.at_start is false"])


def _counted(recipe: Recipe, counts: Sequence[Count]) -> Iterator[str]:
    """Yield a row of the table for each count. Raises DataError with all data sets that cannot be read."""
    from lockstep.data.load import Reading, open_rows
    from lockstep.data.sets import sets_of

    asked = {count.of for count in counts}
    readings: dict[str, Reading] = {}
    missing: list[str] = []
    for one in sets_of(recipe) if counts else ():
        try:
            if one.name in asked:
                readings[one.name] = open_rows(one.data, where=one.where).reading
        except DataError as error:
            missing.append(f"{one.where} ({one.data.source}): {error.what}; {error.fix}")
    if missing:
        raise DataError(
            "; ".join(missing),
            where=recipe.name,
            fix="get the missing data, then run the same command again; data that are here are kept",
        )
    for count in counts:
        if count.of not in readings:
            raise ConfigError([f"counts: {count.of} is not a data set of the recipe; there are {', '.join(readings)}"])
        reading = readings[count.of]
        stages = {stage.name: stage.after for stage in reading.stages} | {"": reading.read}
        if count.after not in stages:
            raise ConfigError(
                [f"counts: no filter of {count.of} is called {count.after}; there are {', '.join(stages)}"]
            )
        here = stages[count.after]
        verdict = "same" if abs(here - count.rows) <= count.within * count.rows else "differs"
        what = f"rows of {count.of}{f' after {count.after}' if count.after else ''}"
        yield f"| {what} | {'about ' if count.within else ''}{count.rows:,} | {here:,} | {verdict} | {count.source} |"


def _figures(found: RunDirectory, figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a row of the table for each published accuracy: the same if it is within the interval of ours."""
    from lockstep.evaluation.collect import records_of

    scores = {record.path.stem: record.brief.score for record in records_of(str(found.path))}
    last = max(score.step for score in scores.values())
    for figure in figures:
        name = f"step_{0 if figure.score == 'base' else last:06d}_{figure.mode}"
        if name not in scores:  # a run that ended early measured others last
            raise ConfigError([f"figures: the run has no score {name}; there are {', '.join(scores)}"])
        mine = scores[name]
        verdict = "within ours" if mine.low <= figure.value <= mine.high else "outside ours"
        here = f"{mine.accuracy:.1%} [{mine.low:.1%}, {mine.high:.1%}] of {mine.items}"
        yield f"| accuracy of {figure.score}, {figure.mode} | {figure.value:.1%} | {here} | {verdict} | {figure.source} |"


def _paired(found: RunDirectory) -> Iterator[str]:
    from lockstep.commands.compare import compare_pair, find_pairs, lines_of

    try:
        pairs, _ = find_pairs([str(found.path)])
    except LockstepError as error:
        yield f"no paired test: {error.what}"
        return
    for pair in pairs:
        yield from lines_of(pair, compare_pair(pair, False, None), items=False)
