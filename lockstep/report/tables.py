"""Rows of the tables of scores and metrics, as text, for the HTML report and for `lockstep view`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.evaluation.table import Row, items_line
from lockstep.report.gather import NamedScore, Outside
from lockstep.track.catalogue import find, healthy_text
from lockstep.types import Score

COMPARISON = ("task", "mode", "items", "base", "trained", "difference, points", "rose / fell", "p", "verdict")
SCORES = ("step", "mode", "items", "accuracy", "truncated", "unscored", "mean tokens")
OUTSIDE = ("metric", "steps", "value there", "healthy", "what to do")


def short(value: float) -> str:
    """Format a number for people: 0.43, 1.05e-05, 12500"""
    return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.5g}"


def share(score: Score) -> str:
    """Format an accuracy with its interval. Example: "25.0 % [14.2, 40.2]" """
    return f"{100 * score.accuracy:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def comparison_row(row: Row) -> tuple[object, ...]:
    """Return the cells of COMPARISON."""
    c = row.comparison
    difference = f"{100 * c.difference:+.1f} [{100 * c.low:+.1f}, {100 * c.high:+.1f}]"
    p = f"{c.p:.2g}" if c.p >= 1e-4 else "< 0.0001"
    rose = f"{c.c} / {c.b}"
    return row.task, row.mode, c.n, share(row.base), share(row.trained), difference, rose, p, c.verdict.value


def score_row(named: NamedScore) -> tuple[object, ...]:
    """Return the cells of SCORES."""
    s = named.score
    return s.step, named.mode, s.items, share(s), f"{100 * s.truncated:.1f} %", s.unscored, f"{s.mean_tokens:.1f}"


def outside_row(row: Outside) -> tuple[object, ...]:
    """Return the cells of OUTSIDE."""
    info = find(row.name)
    values = " … ".join(dict.fromkeys((short(row.first), short(row.last))))
    healthy, advice = (healthy_text(info, row.own), info.advice) if info is not None else ("–", "")
    return row.name, _steps(row.steps), values, healthy, advice


def conditions(score: Score) -> str:
    """Return the conditions of a comparison with the base in one line."""
    c = score.conditions
    what = f"{c.numerics}, engine {c.engine}, {c.max_tokens} tokens, data {c.data_hash[:12]}, template {c.template_hash[:12]}"
    return f"Steps 0 and {score.step}; {what}; {items_line(score)}."


def _steps(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
