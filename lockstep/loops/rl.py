"""The reinforcement-learning loop, end to end: prompt → rollout → reward → advantage → update → sync → evaluate → save."""

from __future__ import annotations

from functools import partial

from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.loops.checks import check_garbage, check_grading
from lockstep.loops.floor import StepFloor
from lockstep.loops.noise import noisy_rollouts
from lockstep.loops.precision import probe_lines
from lockstep.loops.sampling import draw_groups, prepare_rollouts, round_prompts, spread
from lockstep.loops.step_metrics import rollout_metrics
from lockstep.loops.token_log import TokenLog
from lockstep.loops.update import improve
from lockstep.rollout.precision import computing
from lockstep.run.logger import RunLogger
from lockstep.run.session import Session
from lockstep.track.rollouts import write_rollouts
from lockstep.types import Forward, Group


def train(parts: Parts, recipe: Recipe, logger: RunLogger, start: int) -> None:
    """Train from `start` finished steps to the recipe's number, or until eval.stop or a health rule ends the run.

    Raises Interrupted, after saving, on SIGTERM or SIGINT; SyncError, LearnerError or HealthStop if the run must stop.
    """
    with Session(parts, recipe, logger, start) as session:
        for line in probe_lines(parts, recipe):
            logger.note(line)
        session.measure_start()
        floor = StepFloor(parts, recipe)
        groups: list[Group] = []
        for step in session.steps():
            clock = session.clock
            stored = (step + 1) % recipe.track.rollouts_every == 0
            tokens = TokenLog() if recipe.track.tokens and stored else None
            parts.rank_seconds()  # what the last evaluation took
            with session.before_update(step):
                if step == start or step % recipe.health.selftest_every == 0:
                    with clock("selftest"):
                        asked = round_prompts(parts.task, recipe, step, 0, (), 0)
                        check_grading(parts.task, asked, step + 1)
                        if found := check_garbage(parts.task, asked, step + 1, recipe.health.garbage):
                            logger.warn(found, step=step + 1)
                with (
                    computing(parts.engine, Forward(recipe.numerics.of("rollout"))),
                    noisy_rollouts(parts, recipe, step) as noise,
                ):
                    drawn = draw_groups(parts, recipe, logger, step, clock)
            parts.meanwhile.later(groups.clear)  # of the step before: some hundred thousand objects
            groups, kept, metrics = drawn
            measured = parts.meanwhile.later(partial(rollout_metrics, groups, recipe))
            parts.meanwhile.later(partial(prepare_rollouts, parts, recipe, step + 1, follows=session.goes_on(step)))
            with clock("update"):
                advantages, update_metrics = improve(
                    parts, recipe, [groups[index] for index in kept], step, session.spikes, tokens
                )
            parts.meanwhile.drop()
            metrics |= measured() | noise | update_metrics
            metrics |= floor.metrics(groups, metrics)  # while workers push
            metrics |= session.sync() | parts.rank_seconds()
            if stored:
                learned = tokens.take() if tokens else None
                write_rollouts(logger.run, step + 1, groups, spread(groups, kept, advantages), learned)
            session.finish(step, metrics)
            logger.replies(step + 1, groups)
