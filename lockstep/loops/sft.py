"""The supervised loop, end to end: rows → batch → update → (validation loss, generated accuracy, save)."""

from __future__ import annotations

from lockstep.config.schema import Recipe, Sft
from lockstep.data.order import batch_indices
from lockstep.errors import EvaluationError, Interrupted
from lockstep.evaluate.plan import evaluation_steps
from lockstep.loops.disk import disk_metrics
from lockstep.loops.evaluation import evaluate_modes
from lockstep.loops.interrupts import StopRequest
from lockstep.loops.journal import Clock, Journal
from lockstep.loops.keeper import Keeper
from lockstep.loops.measures import proof_metrics
from lockstep.loops.memory import check_memory
from lockstep.loops.parts import Parts
from lockstep.loops.rl import prove_at_start
from lockstep.loops.sft_rows import SftRows, weighted
from lockstep.loops.watch import Watch
from lockstep.seeds import seed_for
from lockstep.types import Batch, Metrics


def train(parts: Parts, recipe: Recipe, rows: SftRows, journal: Journal, start: int) -> None:
    """Train from `start` done steps to the recipe's number, or until eval.stop or a rule of health ends it. Step k of the records
    is the state after k trained steps.

    The engine gets the weights only where they are scored or saved. Raises Interrupted, after saving, on SIGTERM or SIGINT;
    SyncError, LearnerError or HealthStop when the run must stop.
    """
    sft = settings_of(recipe)
    proof = prove_at_start(parts, journal, start)
    keeper, watch = Keeper(parts, recipe, journal), Watch(recipe, journal, start, parts.policy.resolved.path)
    scored, validated = set(evaluation_steps(recipe)), set(validation_steps(recipe)) if rows.validation else set()
    journal.console.start(recipe.steps, start, evaluation_steps(recipe))
    with StopRequest() as stop:
        if start in scored | validated:
            metrics = validation_metrics(parts, rows) if start in validated else {}
            metrics |= evaluate_modes(parts, recipe, journal, start, proof, stop) if start in scored else {}
            journal.at_start(start, metrics, proof)
            watch.note(start, metrics)
            if start:  # the base has no checkpoint that could be kept
                keeper.note(start, metrics)
        for step in range(start, recipe.steps):
            if watch.over:  # by eval.stop or health; the checkpoint of that step is saved
                break
            done, clock, failure = step + 1, Clock(journal.console.phase), None
            with clock("update"):
                metrics = parts.learner.update(sft_batch(parts, recipe, rows, step), parts.objective.loss)
            metrics |= {
                "batch/samples": float(sft.sequences_per_step),
                "sft/epoch": done * sft.sequences_per_step / len(rows.train),
            }
            interrupted = bool(stop)
            save = done % recipe.save.every == 0 or done == recipe.steps or interrupted
            seen = save or done in scored | validated
            if seen:
                with clock("sync"):
                    proof = parts.sync.push(parts.learner, parts.engine)
                metrics |= proof_metrics(proof, parts.sync.shift)
            if done in validated and not interrupted:
                with clock("validate"):
                    metrics |= validation_metrics(parts, rows)
            if done in scored and not interrupted:
                with clock("evaluate"):
                    try:
                        metrics |= evaluate_modes(parts, recipe, journal, done, proof, stop)
                    except (EvaluationError, Interrupted) as error:  # the step itself is done: it is saved first
                        failure = error
            metrics |= clock.metrics(metrics) | check_memory(parts.memory, journal, done, done - start)
            metrics |= disk_metrics(journal.run.path)
            journal.step(done, metrics, proof if seen else None)
            save = bool(watch.note(done, metrics) or failure) or save
            save = keeper.note(done, metrics) or save
            if save and not seen:  # a checkpoint is of proven weights
                proof = parts.sync.push(parts.learner, parts.engine)
                journal.add(done, proof_metrics(proof, parts.sync.shift), proof)
            if save:
                keeper.save(done, proof, clock)
            if interrupted:  # after the last step too: its evaluation and the report are still to come
                raise stop.after(done, recipe.steps, journal.run.path)
            if failure:
                raise failure
    watch.require_healthy()


def sft_batch(parts: Parts, recipe: Recipe, rows: SftRows, step: int) -> Batch:
    """The rows of a step: a function of the recipe and the step alone. Each epoch has an order of its own."""
    size = settings_of(recipe).sequences_per_step
    chosen = [rows.train[i] for i in batch_indices(step, size, len(rows.train), seed_for(recipe.seed, "sft"))]
    weights = parts.objective.weights([sum(one.trained) for one in chosen], [one.group for one in chosen])
    return Batch(weighted(chosen, weights), prefix=rows.prefix, supervised=True)


def validation_metrics(parts: Parts, rows: SftRows) -> Metrics:
    """Mean loss of a trained token over the validation rows, under the present weights."""
    logprobs = parts.learner.response_logprobs(rows.validation, 1.0)
    tokens = sum(sum(one.trained) for one in rows.validation)
    mean = sum(map(sum, logprobs)) / tokens
    return {"validation/loss": -mean, "validation/logprob": mean, "validation/tokens": float(tokens)}


def validation_steps(recipe: Recipe) -> tuple[int, ...]:
    """Trained steps after which the validation loss is measured, the base and the last step among them."""
    every = settings_of(recipe).validate_every or recipe.eval.every
    return (0, *range(every, recipe.steps, every), recipe.steps)


def settings_of(recipe: Recipe) -> Sft:
    """The section that loop = sft must have, by the recipe's own validation."""
    assert recipe.sft is not None
    return recipe.sft
