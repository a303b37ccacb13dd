"""The reinforcement-learning loop, end to end: prompt → rollout → reward → advantage → update → sync → evaluate → save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.config.schema import Recipe
from lockstep.errors import Interrupted
from lockstep.evaluate.plan import evaluation_steps
from lockstep.learner.learner import with_old_logprobs, with_ref_logprobs
from lockstep.loops.evaluation import evaluate_modes
from lockstep.loops.interrupts import StopRequest
from lockstep.loops.journal import Clock, Journal
from lockstep.loops.keeper import Keeper
from lockstep.loops.parts import Parts
from lockstep.loops.rollouts import (
    check_scored,
    grade_groups,
    group_advantages,
    make_batches,
    rollout_metrics,
    sample_groups,
)
from lockstep.sync.record import proof_line
from lockstep.track.rollouts import write_rollouts
from lockstep.types import Batch, Group, Metrics, Proof


def train(parts: Parts, recipe: Recipe, journal: Journal, start: int) -> None:
    """Train from `start` done steps to the recipe's number. Step k of the records is the state after k trained steps.

    Raises Interrupted, after saving, on SIGTERM or SIGINT; SyncError, LearnerError or HealthStop when the run must stop.
    """
    proof = prove_at_start(parts, journal, start)
    keeper = Keeper(parts, recipe, journal)
    due = set(evaluation_steps(recipe))
    with StopRequest() as stop:
        if start in due:
            metrics = evaluate_modes(parts, recipe, journal, start, proof)
            journal.at_start(start, metrics, proof)
            if start:  # the base has no checkpoint that could be kept
                keeper.note(start, metrics)
        journal.console.start(recipe.steps, start)
        for step in range(start, recipe.steps):
            done, clock = step + 1, Clock()
            prompts = parts.task.batch(step, recipe.prompts_per_step)
            with clock("rollout"):
                completions = sample_groups(
                    parts.engine, parts.policy.chat, prompts, recipe, step, parts.learner.version
                )
            with clock("grade"):
                groups = grade_groups(parts.task, parts.policy.chat, prompts, completions)
            if warning := check_scored(groups, recipe, done):
                journal.warn(warning, step=done)
            advantages = group_advantages(groups, parts.objective)
            metrics = rollout_metrics(groups, advantages, recipe)
            with clock("update"):
                metrics |= update(parts, recipe, groups, advantages, step)
            with clock("sync"):
                proof = parts.sync.push(parts.learner, parts.engine)
            metrics |= proof_metrics(proof)
            if done % recipe.track.rollouts_every == 0:
                write_rollouts(journal.run, done, groups, advantages)
            if done in due and not stop:
                with clock("evaluate"):
                    metrics |= evaluate_modes(parts, recipe, journal, done, proof)
            journal.step(done, metrics | clock.metrics(metrics), proof)
            best = keeper.note(done, metrics)
            if best or done % recipe.save.every == 0 or done == recipe.steps or stop:
                with clock("save"):
                    keeper.save(done, proof)
                journal.add(done, {"time/save": clock.seconds["time/save"]})
            if stop:  # after the last step too: its evaluation and the report are still to come
                raise Interrupted(
                    f"{stop.name} after step {done} of {recipe.steps}; a checkpoint was saved",
                    fix=f"lockstep train --resume {journal.run.path}",
                )


def prove_at_start(parts: Parts, journal: Journal, start: int) -> Proof:
    """Give the engine the learner's weights, prove it, and show that the proof would notice a false tensor."""
    proof = parts.sync.push(parts.learner, parts.engine)
    falsified = parts.sync.negative_control(parts.learner, parts.engine)
    journal.say(f"{proof_line(proof)}; negative control: one bit of {falsified} was flipped and noticed")
    journal.event("sync", proof_line(proof), step=start, negative_control=falsified)
    return proof


def update(
    parts: Parts, recipe: Recipe, groups: Sequence[Group], advantages: Sequence[Sequence[float]], step: int
) -> Metrics:
    """All optimizer updates of one step. With several, the ratio's denominator is fixed before the first."""
    metrics: Metrics = {}
    trained = 0
    passes = [
        make_batches(groups, advantages, parts.objective, recipe, step * recipe.update.epochs + epoch)
        for epoch in range(recipe.update.epochs)
    ]
    ready = [[prepare(parts, recipe, batch) for batch in batches] for batches in passes]
    for place, batch in enumerate(batch for batches in ready for batch in batches):
        trained += len(batch.sequences)
        result = parts.learner.update(batch, parts.objective.loss)
        # Mismatch with the engine is a fact of the first update; the tails are those of the worst.
        metrics = result if place == 0 else metrics | worst(metrics, result)
    return metrics | {"batch/samples_trained": float(trained)}


def prepare(parts: Parts, recipe: Recipe, batch: Batch) -> Batch:
    """Attach what the loss compares with: old log-probabilities if there are several updates, the reference's if asked."""
    sequences = list(batch.sequences)
    if recipe.updates_per_step > 1:
        sequences = with_old_logprobs(
            sequences, parts.learner.response_logprobs(sequences, batch.temperature, prefix=batch.prefix)
        )
    if parts.objective.needs_reference:
        reference = parts.learner.response_logprobs(sequences, batch.temperature, reference=True, prefix=batch.prefix)
        sequences = with_ref_logprobs(sequences, reference)
    return replace(batch, sequences=tuple(sequences))


def worst(before: Metrics, after: Metrics) -> Metrics:
    """Sums of counts and maxima of tails over a step's updates; of the rest, the last update's."""
    kept = {name: value for name, value in after.items() if not name.startswith("mismatch/")}
    for name in kept.keys() & before.keys():
        if name.startswith("batch/"):
            kept[name] += before[name]
        elif name.startswith("ratio/") or name == "grad/norm":
            kept[name] = max(kept[name], before[name])
    return kept


def proof_metrics(proof: Proof) -> Metrics:
    metrics = {
        "sync/seconds": proof.seconds,
        "sync/tensors": float(proof.tensors),
        "weights/changed_tensors": float(proof.changed),
    }
    if proof.probe is not None:
        metrics |= {"sync/probe_mean": proof.probe.mean, "sync/probe_max": proof.probe.max}
    return metrics
