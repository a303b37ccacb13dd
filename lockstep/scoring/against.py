"""Compares new scores with stored ones: an export with its run, or a score with the best one of the same items and mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import EvaluationError
from lockstep.evaluation.collect import Record, newest, records_of
from lockstep.evaluation.compare import compare
from lockstep.evaluation.table import score_line
from lockstep.track.rundir import is_run
from lockstep.types import Score

if TYPE_CHECKING:
    from lockstep.scoring.score import Outcome

WEIGHTS = {"weights", "model", "numerics"}
"""Conditions in which an export may differ from the run that it was made from."""


def stored_by(name: str) -> list[Record]:
    """Return the last scores of RUN, or those of RUN@STEP. Raises EvaluationError if there are none."""
    found = newest([record for record in records_of(name) if record.brief.score.step])
    if not found or not is_run(found[0].path.resolve().parents[1]):
        what = "this is not a run directory with scores of trained weights"
        raise EvaluationError(what, where=f"--against {name}", fix="give a run that was evaluated, such as runs/mine")
    return found


def require_same(outcome: Outcome, stored: Sequence[Record], limit: int) -> list[str]:
    """Compare the marks of a target with stored ones; returns a line for each score.

    Raises EvaluationError if more than `limit` marks differ, or if none of the scores is stored under the same conditions.
    """
    lines, beyond = [], []
    for score in outcome.scores:
        for record in stored:
            if record.key != (score.conditions.task, score.conditions.mode):
                continue
            found = compare(record.brief, score, allow_mismatch=True)
            if others := set(found.mismatched) - WEIGHTS:
                lines.append(f"{record.path.name}: not compared, {', '.join(sorted(others))} differ")
                continue
            marks = found.b + found.c
            lines.append(
                f"against {record.label}, {label(score)}: {marks} of {found.n} marks differ (at most {limit}), "
                f"{found.changed_texts} of {found.texts} replies; {found.base:.1%} there, {found.trained:.1%} here"
            )
            if marks > limit:
                beyond.append(lines[-1])
    if beyond or not any(line.startswith("against") for line in lines):
        what = "; ".join(beyond or lines) or "no stored score has the same items and mode"
        fix = "check numerics, chat template and merged weights; evaluate both on the same device with the same threads"
        raise EvaluationError(what, where=f"--against {stored[0].path.resolve().parents[1]}", fix=fix)
    return lines


def best_of(runs: Iterable[Path]) -> dict[tuple[str, ...], Score]:
    """Return the highest stored score of each task, mode, set of items and token budget."""
    top: dict[tuple[str, ...], Score] = {}
    for path in runs:
        try:
            records = records_of(str(path))
        except EvaluationError:  # it was not evaluated, or a file is damaged
            continue
        for score in (record.brief.score for record in records):
            key = key_of(score)
            if key not in top or score.accuracy > top[key].accuracy:
                top[key] = score
    return top


def key_of(score: Score) -> tuple[str, ...]:
    conditions = score.conditions
    return conditions.task, conditions.mode, conditions.data_hash, str(conditions.max_tokens)


def best_lines(outcome: Outcome) -> list[str]:
    """Return the best known score of each mode among the runs beside the target; nothing where it is the target's own."""
    folder = outcome.target.run.parent if outcome.target.run else Path(outcome.target.recipe.runs_dir)
    top = best_of(path for path in sorted(folder.glob("*")) if is_run(path))
    found = [(score, top[key]) for score in outcome.scores if (key := key_of(score)) in top]
    return [
        f"best known of {label(score)}: {score_line(best)}, by {best.source}"
        for score, best in found
        if best.conditions.weights != score.conditions.weights
    ]


def label(score: Score) -> str:
    """Example: "id_probe greedy"."""
    return f"{score.conditions.task.split('/')[1]} {score.conditions.mode}"
