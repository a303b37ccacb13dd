"""The table that compares scores of the base model with those of the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import EvaluationError
from lockstep.evaluation.alarms import untrained_alarm
from lockstep.evaluation.brief import Brief, brief_of, default_estimate
from lockstep.evaluation.compare import Comparison, compare, power_line
from lockstep.evaluation.intervals import worth
from lockstep.track.text import one_line
from lockstep.types import Estimate, Score

TASK_WIDTH = 32
"""Columns of a task's name in the table; a longer one is cut, the scores have it whole."""


@dataclass(frozen=True, slots=True)
class Row:
    """One mode of one task: base, trained, and their paired comparison."""

    task: str
    mode: str
    base: Score
    trained: Score
    comparison: Comparison


def comparison_table(base: Sequence[Score], trained: Sequence[Score], allow_mismatch: bool = False) -> list[Row]:
    """Pair scores by task and mode, in the order of `base`.

    Raises EvaluationError if a task and mode is on one side only, or twice on a side, or if conditions differ.
    """
    left, right = _by_mode(base, "base"), _by_mode(trained, "trained")
    if alone := sorted(set(left) ^ set(right)):
        names = ", ".join(f"{mode} of {task}" for task, mode in alone)
        raise EvaluationError(
            f"only one of the two sides has a score of {names}",
            where="comparison of scores",
            fix="evaluate both sides on the same tasks and in the same modes",
        )
    return [row_of(brief_of(score), brief_of(right[key]), allow_mismatch) for key, score in left.items()]


def row_of(base: Brief, trained: Brief, allow_mismatch: bool = False) -> Row:
    """Return the row of two scores of one task and mode. Raises EvaluationError as `compare`."""
    conditions = base.score.conditions
    return Row(conditions.task, conditions.mode, base.score, trained.score, compare(base, trained, allow_mismatch))


def table_lines(rows: Sequence[Row], reason: str | None = None) -> list[str]:
    """Return the table as plain text, then a line for each warning. Accuracies in per cent, differences in points.

    `reason`: why the run's weights may be those of the base, as `untrained_alarm` takes it.
    """
    head = ["task", "mode", "items", "base", "trained", "difference", "changed", "p", "verdict"]
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    for row in rows:
        lines += [f"{row.mode}: {note}" for note in _notes(row)]
    untrained = (untrained_alarm(row.base, row.trained, reason) for row in rows if not row.comparison.mismatched)
    return [*lines, *(f"alarm: {alarm}" for alarm in dict.fromkeys(filter(None, untrained)))]


def _cells(row: Row) -> list[str]:
    c = row.comparison
    return [
        one_line(row.task, TASK_WIDTH),
        row.mode,
        str(c.n),
        _share(row.base),
        _share(row.trained),
        f"{100 * c.difference:+.1f} [{100 * c.low:+.1f}, {100 * c.high:+.1f}]",
        f"+{c.c} -{c.b}",
        f"{c.p:.2g}" if c.p >= 1e-4 else "<0.0001",
        c.verdict.value,
    ]


def _share(score: Score) -> str:
    return f"{100 * score.accuracy:.1f} %{error_of(score.se)} [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def error_of(se: float | None) -> str:
    """Return " ± 3.4", the standard error in points; "" for a single item, which has none."""
    return "" if se is None else f" ± {100 * se:.1f}"


def estimate_line(one: Estimate) -> str:
    """Return an estimate as text. Example: "pass@8 49.5 % ± 3.5 [42.6, 56.4]"."""
    return f"{one.name} {100 * one.value:.1f} %{error_of(one.se)} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def score_line(score: Score) -> str:
    """Return all numbers of a score, each with its standard error and interval, and what one item is worth."""
    name = default_estimate(score.samples)
    numbers = score.estimates or (Estimate(name, score.accuracy, None, score.low, score.high, score.items),)
    shown = ", ".join(estimate_line(one) for one in numbers)
    return f"{shown}; {items_line(score)}"


def items_line(score: Score) -> str:
    """Say how many items a score is of, and what one is worth. Example: "2 of 8 items scored, 1 item = 50 points"."""
    scored = score.estimates[0].items if score.estimates else score.items
    if score.items == 1:
        return worth(scored)
    items = f"{score.items} items" if scored == score.items else f"{scored} of {score.items} items scored"
    return f"{items}, {worth(scored)}"


def _notes(row: Row) -> list[str]:
    c, notes = row.comparison, [power_line(row.comparison)]
    if c.warning:
        notes.append(f"alarm: {c.warning}")
    for base, trained in zip(row.base.estimates[1:], row.trained.estimates[1:], strict=False):
        if base.name == trained.name:
            notes.append(f"{base.name}: {_numbers(base)} before, {_numbers(trained)} after")
    if c.dropped:
        notes.append(f"{c.dropped} items left out of the comparison: unscored or missing in one of the two")
    if c.mismatched:
        notes.append(f"compared across different {', '.join(c.mismatched)} at your request")
    return notes


def _numbers(one: Estimate) -> str:
    return f"{100 * one.value:.1f} %{error_of(one.se)}"


def _by_mode(scores: Sequence[Score], side: str) -> dict[tuple[str, str], Score]:
    found: dict[tuple[str, str], Score] = {}
    for score in scores:
        key = (score.conditions.task, score.conditions.mode)
        if key in found:
            raise EvaluationError(
                f"{key[0]}, mode {key[1]}: there are two {side} scores",
                where="comparison of scores",
                fix="give the scores of only one checkpoint for each side of the comparison",
            )
        found[key] = score
    return found
