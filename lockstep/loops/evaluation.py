"""Evaluations inside a run: all modes at one step, stored as scores, and the final comparison with the base."""

from __future__ import annotations

from lockstep.config.schema import Recipe
from lockstep.evaluate.plan import eval_plan
from lockstep.evaluate.records import read_score, score_path, stored_score, write_score
from lockstep.evaluate.runner import evaluate, heldout_items, score_conditions
from lockstep.evaluate.table import comparison_table, table_lines
from lockstep.loops.journal import Journal
from lockstep.loops.parts import Parts
from lockstep.types import Metrics, Proof, Score


def evaluate_modes(parts: Parts, recipe: Recipe, journal: Journal, step: int, proof: Proof) -> Metrics:
    """Score the present weights in every mode; a score that exists under identical conditions is not measured again."""
    plan = eval_plan(recipe, parts.policy.numerics, parts.policy.context)
    metrics: Metrics = {}
    for mode in recipe.eval.modes:
        path = score_path(journal.run.path, step, mode.name)
        items = heldout_items(parts.task, plan)
        conditions = score_conditions(items, parts.task, parts.policy.chat, mode, plan, proof)
        score = stored_score(path, conditions)
        if score is None:
            score = evaluate(parts.engine, parts.task, parts.policy.chat, mode, plan, proof, step=step)
            write_score(path, score)
        journal.say(
            f"eval at step {step}, {score.conditions.mode}: {score.accuracy:.1%} [{score.low:.1%}, {score.high:.1%}] "
            f"of {score.items} items, {score.conditions.numerics}, {score.seconds:.1f} s"
        )
        metrics |= _metrics(mode.name, score)
    return metrics


def final_table(recipe: Recipe, journal: Journal) -> list[str]:
    """Base against trained, for every mode that has both scores."""
    base, trained = [], []
    for mode in recipe.eval.modes:
        first, last = (score_path(journal.run.path, step, mode.name) for step in (0, recipe.steps))
        if first.is_file() and last.is_file():
            base.append(read_score(first))
            trained.append(read_score(last))
    return table_lines(comparison_table(base, trained)) if base else []


def _metrics(mode: str, score: Score) -> Metrics:
    return {
        f"eval/{mode}/accuracy": score.accuracy,
        f"eval/{mode}/low": score.low,
        f"eval/{mode}/high": score.high,
        f"eval/{mode}/truncated": score.truncated,
        f"eval/{mode}/unscored": score.unscored / (score.items * score.samples),
        f"eval/{mode}/mean_tokens": score.mean_tokens,
    }
