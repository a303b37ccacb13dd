"""The reinforcement-learning loop, end to end: prompt → rollout → reward → advantage → update → sync → evaluate → save."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.schema import Recipe
from lockstep.errors import EvaluationError, Interrupted
from lockstep.evaluate.plan import evaluation_steps
from lockstep.loops.base import base_print
from lockstep.loops.credit import Samples, advantage_rows, assign_credit, mean_kl, train_samples
from lockstep.loops.disk import disk_metrics
from lockstep.loops.evaluation import evaluate_modes
from lockstep.loops.forward import computing, probe_lines
from lockstep.loops.interrupts import StopRequest
from lockstep.loops.journal import Clock, Journal
from lockstep.loops.keeper import Keeper
from lockstep.loops.measures import credit_metrics, proof_metrics, rollout_metrics
from lockstep.loops.memory import check_memory
from lockstep.loops.noise import noise_targets, noisy_rollouts
from lockstep.loops.parts import Parts
from lockstep.loops.passes import before_credit, before_updates
from lockstep.loops.sampling import draw_groups, round_prompts, sampling_metrics
from lockstep.loops.selftest import check_grading
from lockstep.loops.updates import run_updates, warms_up
from lockstep.loops.watch import Watch
from lockstep.sync.record import proof_line
from lockstep.track.rollouts import write_rollouts
from lockstep.types import Forward, Group, Metrics, Proof


def train(parts: Parts, recipe: Recipe, journal: Journal, start: int) -> None:
    """Train from `start` done steps to the recipe's number, or until eval.stop or a rule of health ends it. Step k of the records
    is the state after k trained steps.

    Raises Interrupted, after saving, on SIGTERM or SIGINT; SyncError, LearnerError or HealthStop when the run must stop.
    """
    proof = prove_at_start(parts, journal, start)
    for line in probe_lines(parts, recipe):
        journal.note(line)
    keeper, targets = Keeper(parts, recipe, journal), noise_targets(parts, recipe)
    watch = Watch(recipe, journal, start, parts.policy.resolved.path)
    due = set(evaluation_steps(recipe))
    journal.console.start(recipe.steps, start, evaluation_steps(recipe))
    with StopRequest() as stop:
        if start in due:
            metrics = evaluate_modes(parts, recipe, journal, start, proof, stop)
            journal.at_start(start, metrics, proof)
            watch.note(start, metrics)
            if start:  # the base has no checkpoint that could be kept
                keeper.note(start, metrics)
        for step in range(start, recipe.steps):
            if watch.over:  # by eval.stop or health; the checkpoint of that step is saved
                break
            done, clock, failure = step + 1, Clock(journal.console.phase), None
            if step == start or step % recipe.health.selftest_every == 0:
                with keeper.saving_if_stopped(step, proof, clock), clock("selftest"):
                    check_grading(parts.task, round_prompts(parts.task, recipe, step, 0, (), 0), done)
            with (
                keeper.saving_if_stopped(step, proof, clock),
                computing(parts.engine, Forward(recipe.numerics.of("rollout"))),
                noisy_rollouts(parts, recipe, targets, step) as noise,
            ):
                drawn = draw_groups(parts, recipe, step, clock)
            for warning in drawn.warnings:
                journal.warn(warning, step=done)
            with clock("update"):
                rows, metrics = improve(parts, recipe, drawn.kept_groups, step)
            metrics |= rollout_metrics(drawn.groups, recipe) | noise
            metrics |= sampling_metrics(drawn, recipe, parts.carried.empty_steps)
            with clock("sync"):
                proof = parts.sync.push(parts.learner, parts.engine)
            metrics |= proof_metrics(proof, parts.sync.shift)
            if done % recipe.track.rollouts_every == 0:
                write_rollouts(journal.run, done, drawn.groups, drawn.spread(rows))
            if done in due and not stop:
                with clock("evaluate"):
                    try:
                        metrics |= evaluate_modes(parts, recipe, journal, done, proof, stop)
                    except (EvaluationError, Interrupted) as error:  # the step itself is done: it is saved first
                        failure = error
            metrics |= clock.metrics(metrics) | check_memory(parts.memory, journal, done, done - start)
            metrics |= disk_metrics(journal.run.path)
            journal.step(done, metrics, proof)
            over = watch.note(done, metrics)
            best = keeper.note(done, metrics)
            if best or done % recipe.save.every == 0 or done == recipe.steps or stop or over or failure:
                keeper.save(done, proof, clock)
            if stop:  # after the last step too: its evaluation and the report are still to come
                raise stop.after(done, recipe.steps, journal.run.path)
            if failure:
                raise failure
    watch.require_healthy()


def prove_at_start(parts: Parts, journal: Journal, start: int) -> Proof:
    """Give the engine the learner's weights, prove it, and show that the proof would notice a false tensor."""
    proof = parts.sync.push(parts.learner, parts.engine)
    falsified = parts.sync.negative_control(parts.learner, parts.engine)
    journal.note(f"{proof_line(proof)}; negative control: one bit of {falsified} was flipped and noticed")
    journal.say(f"weights {proof.fingerprint}: the engine is proven to hold those of the learner")
    began = {"base": base_print(parts.policy.model, proof)} if start == 0 else {}
    journal.event("sync", proof_line(proof), step=start, negative_control=falsified, **began)
    return proof


def improve(
    parts: Parts, recipe: Recipe, groups: Sequence[Group], step: int
) -> tuple[list[tuple[float, ...]], Metrics]:
    """From graded groups to new weights. Returns an advantage per reply, group by group, and what happened.

    Without a group the weights stay as they are, and the step is counted as empty.
    """
    samples = train_samples(groups, recipe, parts.carried.kl_coef)
    samples = before_credit(parts, recipe, samples)
    samples = assign_credit(parts.objective, recipe, groups, samples)
    if not warms_up(recipe, step):
        samples = before_updates(parts, recipe, samples)
    rows = advantage_rows(groups, samples)
    metrics = credit_metrics(groups, rows, samples, recipe)
    metrics |= run_updates(parts, recipe, samples, step)
    return rows, metrics | carry_on(parts, recipe, samples)


def carry_on(parts: Parts, recipe: Recipe, samples: Samples) -> Metrics:
    """Set what the next step inherits besides weights; returns what that was decided by."""
    if not samples.sequences:
        parts.carried.empty_steps += 1
    kl = mean_kl(samples)
    if kl is None:
        return {}
    parts.carried.adapt_kl(recipe, kl, len(samples.sequences))
    return {"kl/k1": kl}
