"""Evaluations inside a run: all sets and modes at one step, their alarms, and the final comparison with the base."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from lockstep.build.parts import Parts
from lockstep.config.numerics import numeric_in
from lockstep.config.schema import EvalMode, EvalSet, LmEvalSet, Recipe
from lockstep.errors import EvaluationError, Interrupted
from lockstep.evaluation.alarms import identity_alarms, reading, reply_alarms, still_reason, untrained_alarm
from lockstep.evaluation.brief import brief_of
from lockstep.evaluation.compare import FEW
from lockstep.evaluation.gates import judged_line, verdict_lines
from lockstep.evaluation.plan import eval_plan, is_due
from lockstep.evaluation.records import read_brief, read_score, score_path, stored_score, write_score
from lockstep.evaluation.runner import evaluate, heldout_items, score_conditions
from lockstep.evaluation.table import comparison_table, score_line, table_lines
from lockstep.rollout import precision
from lockstep.run.logger import RunLogger
from lockstep.run.monitor import last_evaluated
from lockstep.run.signals import StopRequest
from lockstep.track.writer import read_metrics
from lockstep.types import Conditions, Forward, ForwardReport, Metrics, Proof, RolloutEngine, Score


def evaluate_modes(
    parts: Parts, recipe: Recipe, logger: RunLogger, step: int, proof: Proof, stop: StopRequest
) -> Metrics:
    """Score the present weights on every set that is due, in its modes; a score under identical conditions is not measured again.

    Raises Interrupted on a signal: finished scores are kept, the unfinished one is left to a resume.
    """
    metrics: Metrics = {}
    numerics = recipe.numerics.label("eval", parts.policy.numerics)
    evaluation = _Evaluation(parts, recipe, logger, step, proof, stop, numerics)
    with computing(parts.engine, numerics), logger.console.evaluating():
        for chosen, mode in recipe.eval.pairs:
            if is_due(recipe, chosen, step):
                metrics |= _report(recipe, logger, step, chosen, mode, evaluation.measure(chosen, mode))
        for asked in recipe.eval.lm_eval:
            score = evaluation.measure_task(asked)
            logger.say(f"eval at step {step}, lm-eval {asked.name}: {score_line(score)}, {score.seconds:.1f} s")
            metrics |= score_metrics(f"lm_eval.{asked.name}", score)
    if step in recipe.eval.judged.steps:
        line = judged_line(recipe, logger.run, step)
        logger.event("judged", line, step=step)
        logger.say(line)
    return metrics


def _report(recipe: Recipe, logger: RunLogger, step: int, chosen: EvalSet, mode: EvalMode, score: Score) -> Metrics:
    """Print a score and what makes it hard to believe. Returns its metrics."""
    name = recipe.eval.score_name(chosen.role, mode.name)
    logger.say(
        f"eval at step {step}, {score.conditions.mode} of {chosen.role}: {score_line(score)}, "
        f"{score.conditions.numerics}, {score.seconds:.1f} s"
    )
    # In between log.txt alone: the shares are metrics with healthy ranges, which the step's line marks.
    say = logger.say if step in (0, recipe.steps) else logger.note
    for alarm in reply_alarms(score):
        say(f"alarm: {name}: {alarm}")
    for alarm in _since_the_base(logger, name, score):
        logger.warn(f"eval at step {step}, {name}: {alarm}", step=step)
    return score_metrics(name, score)


def computing(engine: RolloutEngine, numerics: str) -> AbstractContextManager[ForwardReport]:
    """Compute in `numerics`, the label of a score, without noise, inside the block, and as before afterwards.

    Raises EngineError if the engine cannot, or if no layer would be changed.
    """
    return precision.computing(engine, Forward(numeric_in(numerics)))


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The evaluations of one step."""

    parts: Parts
    recipe: Recipe
    logger: RunLogger
    step: int
    proof: Proof
    stop: StopRequest
    numerics: str

    def measure(self, chosen: EvalSet, mode: EvalMode) -> Score:
        """Score a set of the run's task in a mode."""
        parts, chat = self.parts, self.parts.policy.chat
        plan = eval_plan(self.recipe, self.numerics, parts.policy.context, chosen)
        conditions = score_conditions(heldout_items(parts.task, plan), parts.task, chat, mode, plan, self.proof)
        run = partial(evaluate, parts.engine, parts.task, chat, mode, plan, self.proof)
        return self._once(
            self.recipe.eval.score_name(chosen.role, mode.name), f"{mode.name} of {chosen.role}", conditions, run
        )

    def measure_task(self, asked: LmEvalSet) -> Score:
        """Score a task of lm-eval."""
        from lockstep.evaluation.lm_eval import conditions_of, evaluate_task, load_task

        parts, chat = self.parts, self.parts.policy.chat
        task = load_task(asked, chat)
        plan = eval_plan(self.recipe, self.numerics, parts.policy.context)
        run = partial(evaluate_task, parts.engine, task, chat, plan, self.proof)
        conditions = conditions_of(task, chat, plan, self.proof)
        return self._once(f"lm_eval.{asked.name}", f"{asked.name} of lm-eval", conditions, run)

    def _once(self, name: str, words: str, conditions: Conditions, run: Callable[..., Score]) -> Score:
        """Return the stored score under these conditions; measure and store it if there is none."""
        path = score_path(self.logger.run.path, self.step, name)
        if (stored := stored_score(path, conditions)) is not None:
            return stored

        def progress(done: int, of: int) -> None:
            self.stop.require_none(self.logger.run.path)
            self.logger.progress(f"evaluating {words}", done, of)

        try:
            score = run(step=self.step, source=f"{self.logger.run.name} at step {self.step}", progress=progress)
        except Interrupted:
            self.parts.engine.close()  # the rest of its replies is not needed
            raise
        write_score(path, score)
        return score


def _since_the_base(logger: RunLogger, name: str, score: Score) -> list[str]:
    """Return alarms if the score is suspiciously close to the base's own score, if the run has one."""
    path = score_path(logger.run.path, 0, name)
    if score.step == 0 or not path.is_file():
        return []
    base = read_brief(path)
    enough = score.items * score.samples >= FEW
    same = identity_alarms([("step 0", base), (f"step {score.step}", brief_of(score))]) if enough else []
    untrained = untrained_alarm(base.score, score, _reason(logger))
    return [*same, *([untrained] if untrained else [])]


def _reason(logger: RunLogger) -> str | None:
    """Return why the run's steps can have left the weights as they were; see `still_reason`."""
    return still_reason([row.metrics for row in read_metrics(logger.run) if row.step])


def final_table(recipe: Recipe, logger: RunLogger) -> list[str]:
    """Return the comparison of the base with the last evaluated weights, for every set and mode that has both scores."""
    base, trained, last = [], [], last_evaluated(recipe, logger)
    for name in (*recipe.eval.scores, *(f"lm_eval.{one.name}" for one in recipe.eval.lm_eval)):
        first, end = (score_path(logger.run.path, step, name) for step in (0, last))
        if first.is_file() and end.is_file():
            base.append(read_score(first))
            trained.append(read_score(end))
    try:
        lines = table_lines(comparison_table(base, trained), _reason(logger)) if base else []
        if verdict := verdict_lines(recipe, logger.run):
            logger.event("judged", verdict[-1], step=last)
        return lines + verdict
    except EvaluationError as error:  # a score of an earlier attempt under other conditions: the run itself is sound
        return [f"base and trained are not compared: {error}"]


def score_metrics(name: str, score: Score) -> Metrics:
    """Return a score's numbers as metrics eval/<name>/…"""
    r = reading(score.results)
    numbers: Metrics = {
        "accuracy": score.accuracy,
        "low": score.low,
        "high": score.high,
        "truncated": score.truncated,
        "unscored": score.unscored / (score.items * score.samples),
        "mean_tokens": score.mean_tokens,
    }
    if score.se is not None:
        numbers["se"] = score.se
    if r.boxed_rate is not None:
        numbers["boxed"] = r.boxed_rate
    if r.unparsed_rate is not None:
        numbers["unparsed"] = r.unparsed_rate
    numbers |= {one.name: one.value for one in score.estimates}
    return {f"eval/{name}/{key}": value for key, value in numbers.items()}
