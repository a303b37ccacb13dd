"""Reads the content of the HTML report from a run directory. A part that cannot be read becomes a note in the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.load import load_mapping
from lockstep.config.metric import Range
from lockstep.config.schema import Recipe
from lockstep.config.text import parse
from lockstep.errors import ConfigError, EvaluationError, RunDirectoryError
from lockstep.evaluation.records import read_score
from lockstep.evaluation.table import Row, comparison_table
from lockstep.track.catalogue import Judge
from lockstep.track.rollouts import RolloutRow, read_rollouts, rollout_steps
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import Event, StepRecord, read_events, read_metrics
from lockstep.types import Score

SAMPLES = 10


@dataclass(frozen=True, slots=True)
class NamedScore:
    """A score and the name of its mode in the recipe, from the file's name."""

    mode: str
    score: Score


@dataclass(frozen=True, slots=True)
class Outside:
    """A metric that left its healthy range."""

    name: str
    steps: tuple[int, ...]
    first: float
    last: float
    own: Range | None = None
    """The recipe's range in place of the table's."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Some rollouts of one step."""

    step: int
    rows: tuple[RolloutRow, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Everything on the page."""

    name: str
    manifest: dict[str, Any]
    recipe_yaml: str
    recipe: Recipe | None
    """None if this version's schema does not accept it."""
    records: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    scores: tuple[NamedScore, ...]
    rows: tuple[Row, ...]
    """Base against trained."""
    outside: tuple[Outside, ...]
    samples: Samples | None
    notes: tuple[str, ...]
    """Parts that could not be read or compared, and why."""


def gather(run: RunDirectory) -> RunFacts:
    """Read a run's files. Raises RunDirectoryError if the manifest, recipe, metrics or events are unreadable."""
    notes: list[str] = []
    records = read_metrics(run)
    last = records[-1].step if records else None
    scores = read_scores(run, last, notes)
    recipe_yaml = run.recipe_yaml()
    recipe = _recipe(recipe_yaml, notes)
    return RunFacts(
        name=run.name,
        manifest=run.manifest(),
        recipe_yaml=recipe_yaml,
        recipe=recipe,
        records=tuple(records),
        events=tuple(read_events(run)),
        scores=tuple(scores),
        rows=tuple(_compare([named.score for named in scores], notes)),
        outside=tuple(find_outside(records, recipe.health.ranges if recipe else {})),
        samples=_samples(run, last, notes),
        notes=tuple(notes),
    )


def find_outside(records: Sequence[StepRecord], ranges: Mapping[str, Range]) -> list[Outside]:
    """Return the metrics that left their range, most often outside first, each with its steps, first and last such value.

    `ranges`, by metric, stand in place of the table's (health.ranges).
    """
    judge = Judge(ranges)
    found: dict[str, list[StepRecord]] = {}
    for record in records:
        for name in judge.step(record.step, record.metrics):
            found.setdefault(name, []).append(record)
    rows = [
        Outside(name, tuple(r.step for r in where), where[0].metrics[name], where[-1].metrics[name], ranges.get(name))
        for name, where in found.items()
    ]
    return sorted(rows, key=lambda row: (-len(row.steps), row.name))


def choose_samples(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    """Choose a mix for reading: unscored, wrong and right replies in turn, of different prompts first; always the same."""
    first_of_prompt = {id(row) for row in {row.prompt_id: row for row in reversed(rows)}.values()}
    ordered = sorted(rows, key=lambda row: id(row) not in first_of_prompt)
    kinds = [[row for row in ordered if row.right is kind] for kind in (None, False, True)]
    chosen: list[RolloutRow] = []
    while any(kinds) and len(chosen) < SAMPLES:
        chosen += [kind.pop(0) for kind in kinds if kind]
    return chosen[:SAMPLES]


def read_scores(run: RunDirectory, last: int | None, notes: list[str]) -> list[NamedScore]:
    """Read the scores of the weights that the run continued with; `notes` says which are left out, and why."""
    scores: list[NamedScore] = []
    for path in sorted(run.scores_path.glob("*.json")):
        try:
            score = read_score(path)
        except EvaluationError as error:
            notes.append(f"{path.name} is left out: {error.what}")
            continue
        if last is not None and score.step > last:
            notes.append(f"{path.name} is left out: its weights belong to an attempt that the run did not continue")
        else:
            scores.append(NamedScore(re.sub(r"^step_\d+_", "", path.stem), score))
    return sorted(scores, key=lambda named: (named.score.step, named.mode))


def _mode_of(score: Score) -> tuple[str, str]:
    return score.conditions.task, score.conditions.mode


def _compare(scores: Sequence[Score], notes: list[str]) -> list[Row]:
    last = max((score.step for score in scores), default=0)
    trained = [score for score in scores if score.step == last]
    measured = {_mode_of(score) for score in trained}  # sets have cadences of their own
    base = [one for one in scores if one.step == 0 and _mode_of(one) in measured]
    if not base or last == 0:
        return []
    rows: list[Row] = []
    for mode in dict.fromkeys(map(_mode_of, (*base, *trained))):
        before, after = ([one for one in side if _mode_of(one) == mode] for side in (base, trained))
        try:
            rows += comparison_table(before, after)
        except EvaluationError as error:  # the others are compared all the same
            notes.append(f"base and trained are not compared: {error.what}")
    return rows


def _recipe(text: str, notes: list[str]) -> Recipe | None:
    try:
        tree = parse(text, "recipe.yaml").value
        if not isinstance(tree, dict):
            raise ConfigError(["the recipe is not a mapping of settings"])
        return load_mapping(tree)
    except ConfigError as error:
        notes.append(f"recipe.yaml is not a recipe of this version: {error.mistakes[0]}")
        return None


def _samples(run: RunDirectory, last: int | None, notes: list[str]) -> Samples | None:
    steps = [step for step in rollout_steps(run) if last is None or step <= last]
    if not steps:
        return None
    try:
        return Samples(steps[-1], tuple(choose_samples(read_rollouts(run, steps[-1]))))
    except RunDirectoryError as error:
        notes.append(f"rollouts of step {steps[-1]} are left out: {error.what}")
        return None
