"""The sample funnel: rollouts asked for, generated, scored and with an advantage, with the reasons for the losses."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.report.figures import Figure, Series
from lockstep.view.index import Index

UNSCORED_SHOWN = 8
ADVANTAGE = "with an advantage"
"""Name of the last stage."""

COUNTS = """
WITH chosen AS (
  SELECT *, min(reward) OVER g AS lowest, max(reward) OVER g AS highest, max(abs(advantage)) OVER g AS most,
    avg(reward) OVER g AS middle
  FROM rollouts WHERE run = ? AND step BETWEEN ? AND ?
  WINDOW g AS (PARTITION BY step, prompt_id)
)
SELECT step, CASE
  WHEN length = 0 THEN 'empty'
  WHEN reward IS NULL THEN 'unscored'
  WHEN advantage <> 0 THEN 'advantage'
  WHEN lowest = highest THEN 'equal'
  WHEN most > 0 AND abs(reward - middle) < 1e-9 THEN 'mean'  -- also of replies that were cut off: they may be trained
  WHEN finish = 'length' THEN 'cut'
  WHEN most = 0 THEN 'unused'
  ELSE 'mean' END AS fate, count(*) AS count
FROM chosen GROUP BY ALL ORDER BY ALL
"""
ERRORS = """
SELECT coalesce(left(error, 200), 'no reason was stored') AS reason, count(*) AS count FROM rollouts
WHERE run = ? AND step BETWEEN ? AND ? AND reward IS NULL AND length > 0 GROUP BY ALL ORDER BY count DESC, reason
"""
WHY = {
    "equal": "all rewards of the group are equal, mean advantage 0",
    "cut": "cut off at the token budget, mean advantage 0",
    "unused": "mean advantage 0 in the whole group: left out by dynamic sampling, or its tokens' advantages add up to 0",
    "mean": "mean advantage 0: reward equal to the baseline, or its tokens' advantages add up to 0",
}
"""Reasons why a scored rollout has no advantage. What is stored is the mean over its tokens; a user-defined estimator can give
tokens advantages whose mean is 0, and these are trained.
"""


@dataclass(frozen=True, slots=True)
class Loss:
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The rollouts that are left at a stage, and why the others did not reach it."""

    name: str
    count: int
    lost: tuple[Loss, ...] = ()


@dataclass(frozen=True, slots=True)
class Funnel:
    stages: tuple[Stage, ...]
    by_step: Figure


def funnel(index: Index, run: int, first: int, last: int) -> Funnel:
    """Count the rollouts of the steps from `first` to `last` that are stored."""
    rows = index.rows(COUNTS, [run, first, last])
    fates = {(row["step"], row["fate"]): row["count"] for row in rows}
    total = {fate: sum(count for (_, one), count in fates.items() if one == fate) for _, fate in fates}
    errors = [Loss(row["reason"], row["count"]) for row in index.rows(ERRORS, [run, first, last])]
    if len(errors) > UNSCORED_SHOWN:
        rest = sum(one.count for one in errors[UNSCORED_SHOWN:])
        errors = [*errors[:UNSCORED_SHOWN], Loss(f"{len(errors) - UNSCORED_SHOWN} other reasons", rest)]
    idle = [Loss(why, total[fate]) for fate, why in WHY.items() if total.get(fate)]
    asked = sum(total.values())
    generated = asked - total.get("empty", 0)
    scored = generated - total.get("unscored", 0)
    stages = (
        Stage("asked for", asked),
        Stage("generated", generated, (Loss("the reply is empty", asked - generated),) if asked > generated else ()),
        Stage("scored", scored, tuple(errors)),
        Stage(ADVANTAGE, total.get("advantage", 0), tuple(idle)),
    )
    return Funnel(stages, _by_step(fates))


def _by_step(fates: dict[tuple[int, str], int]) -> Figure:
    steps = tuple(sorted({step for step, _ in fates}))
    parts = {ADVANTAGE: ("advantage",), "no advantage": tuple(WHY), "unscored or empty": ("unscored", "empty")}
    series = [
        Series(label, steps, tuple(float(sum(fates.get((step, fate), 0) for fate in names)) for step in steps))
        for label, names in parts.items()
    ]
    shown = tuple(one for one in series if any(one.y))
    return Figure("Rollouts of each step", "rollouts", shown, kind="stack")
