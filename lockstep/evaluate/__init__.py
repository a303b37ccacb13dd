"""Evaluation: its steps and conditions, intervals, and comparisons."""

from __future__ import annotations

from lockstep.evaluate.compare import Comparison, Verdict, compare
from lockstep.evaluate.plan import EvalPlan, eval_plan, evaluation_steps, mode_label, plan_lines
from lockstep.evaluate.records import comparable, read_score, score_path, stored_score, write_score
from lockstep.evaluate.runner import evaluate, heldout_items, score_conditions
from lockstep.evaluate.table import Row, comparison_table, table_lines

__all__ = [
    "Comparison",
    "EvalPlan",
    "Row",
    "Verdict",
    "comparable",
    "compare",
    "comparison_table",
    "eval_plan",
    "evaluate",
    "evaluation_steps",
    "heldout_items",
    "mode_label",
    "plan_lines",
    "read_score",
    "score_conditions",
    "score_path",
    "stored_score",
    "table_lines",
    "write_score",
]
