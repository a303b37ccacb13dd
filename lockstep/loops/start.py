"""Starts and resumes a run: the checks, the run directory and the objects of its training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from lockstep.build.disk import check_disk
from lockstep.build.opponents import load_opponents, pinned_opponents
from lockstep.build.parts import Parts
from lockstep.build.warm_start import Parent, pinned, read_weights
from lockstep.checkpoint.store import CheckpointInfo, list_checkpoints, open_checkpoint, set_aside
from lockstep.cluster.build import place_parts
from lockstep.config.load import dump, load
from lockstep.config.numerics import PHASES
from lockstep.config.schema import Allowable, Recipe, Sft
from lockstep.data.questions import data_hash
from lockstep.doctor.check import Check
from lockstep.doctor.run import require_machine
from lockstep.errors import CheckpointError, HealthStop, LockstepError, StorageError, WorkerLost
from lockstep.evaluation.plan import plan_lines
from lockstep.health.rules import health_lines
from lockstep.loops import sft
from lockstep.loops.checks import questions_hash, require_same_data, require_unchanged
from lockstep.loops.precision import numerics_lines
from lockstep.loops.preflight import Ready, preflight, with_known_steps
from lockstep.loops.rl import train
from lockstep.loops.sft_data import Material, SftRows, preview, tokenised
from lockstep.loops.step_metrics import grading_line
from lockstep.noise.schedule import noise_lines
from lockstep.plan.batch import batch_lines, rate_lines
from lockstep.plan.refusals import require_allowed
from lockstep.report.html import write_report
from lockstep.run.evaluation import final_table
from lockstep.run.extend import EXTENDED, began_with, extend, lengths
from lockstep.run.logger import RunLogger
from lockstep.run.state import known_recipes, recipe_hash, require_own_recipe, require_own_rows, restore
from lockstep.track.provenance import keep_sources
from lockstep.track.rundir import RunDirectory, manifest_facts, refuse_taken
from lockstep.track.sinks import check_installed
from lockstep.track.writer import read_events, read_metrics
from lockstep.workers.pool import ended_after


def start_run(recipe: Recipe) -> RunDirectory:
    """Train a recipe from the beginning in a new run directory. Raises LockstepError; the run directory records the reason."""
    return _restarting(lambda: _start(recipe), Path(recipe.runs_dir) / recipe.name, recipe.restarts)


def _start(recipe: Recipe) -> RunDirectory:
    check_installed(recipe.track)
    warned = require_machine(recipe)
    allowed = [refusal.line for refusal in require_allowed(recipe)]
    refuse_taken(Path(recipe.runs_dir) / recipe.name, recipe.paths.checkpoints)
    recipe = with_known_steps(pinned_opponents(pinned(recipe)))
    ready = preflight(recipe)  # a failure here costs no run directory
    facts = {**manifest_facts(), "recipe": recipe_hash(recipe)} | ({"allowed": allowed} if allowed else {})
    run = RunDirectory.create(Path(recipe.runs_dir) / recipe.name, dump(recipe), facts, recipe.paths.checkpoints)
    with run:
        _run(run, recipe, None, warned, ready)
    return run


def resume_run(
    path: Path,
    health: Sequence[str] = (),
    *,
    allow: Sequence[Allowable] = (),
    allow_fallback: bool = False,
    steps: int | None = None,
) -> RunDirectory:
    """Continue a run from its newest intact checkpoint, or from the beginning if it has none yet.

    `health`: overrides of settings of health and placement, and of optimizer.offload; `allow`: refusals that are let through.
    They change no number of the run and are stored with it, and what was let through before stays so. `steps`: the step to end
    at, beyond the one that the run was started with.
    """
    found = RunDirectory.open(path)
    own = _own_recipe(found, health)  # a mistake must not cost an attempt
    if steps is not None:
        extend(own, steps, found)
    return _restarting(lambda: _resume(path, health, allow, allow_fallback, steps), path, own.restarts)


def _restarting(attempt: Callable[[], RunDirectory], path: Path, left: int) -> RunDirectory:
    """Make an attempt; if a worker is lost, go on from the newest checkpoint, at most `left` times."""
    try:
        with ended_after():
            return attempt()
    except WorkerLost:
        if not left:
            raise
    return _restarting(lambda: _resume(path), path, left - 1)


def _resume(
    path: Path,
    health: Sequence[str] = (),
    allow: Sequence[Allowable] = (),
    allow_fallback: bool = False,
    steps: int | None = None,
) -> RunDirectory:
    run = RunDirectory.resume(path, manifest_facts())
    with run:
        recipe = _own_recipe(run, health)
        recipe = recipe.model_copy(update={"allow": sorted({*recipe.allow, *allow})})
        if steps is not None:
            before, recipe = recipe.steps, extend(recipe, steps, run)
            run.add_to_manifest({EXTENDED: [*(lengths(run) or [before]), steps]})
        if health or allow or steps is not None:
            run.replace_recipe(dump(recipe))
        _run(run, recipe, _newest(run, allow_fallback), require_machine(recipe))
    return run


def _own_recipe(run: RunDirectory, health: Sequence[str]) -> Recipe:
    recipe = load([str(run.recipe_path), *health])
    require_own_recipe(run, recipe)
    return recipe


def _newest(run: RunDirectory, allow_fallback: bool) -> CheckpointInfo | None:
    """Return the checkpoint to continue from; None to begin. Raises CheckpointError for a damaged or removed checkpoint."""
    # A damaged checkpoint is listed, too; only the remains of a killed save (a hidden folder) are not.
    there = [info for info in list_checkpoints(run.path) if info.complete or not info.path.name.startswith(".")]
    info = open_checkpoint(run.path, allow_fallback=allow_fallback) if there else None
    saved = _last_saved(run)
    if saved > (info.step if info else 0) and not allow_fallback:
        begin = f"from step {info.step}" if info else "from the beginning"
        raise CheckpointError(
            f"the checkpoint of step {saved}, the last that was saved, is missing",
            where=str(run.checkpoints_path),
            fix=f"put this checkpoint back, or continue {begin} with --allow-fallback",
        )
    if info is not None:
        require_own_rows(run, info)
    return info


def _last_saved(run: RunDirectory) -> int:
    """Return the step of the newest checkpoint by the events, 0 for none. One that was given up for an earlier one is none."""
    kinds = ("checkpoint", "fallback")
    return next((event.step or 0 for event in reversed(read_events(run)) if event.kind in kinds), 0)


def _run(
    run: RunDirectory, recipe: Recipe, info: CheckpointInfo | None, machine: list[Check], ready: Ready | None = None
) -> None:
    logger, stack = RunLogger(run, recipe, info.step if info else 0), ExitStack()
    try:
        if run.replaced:
            logger.say(f"{run.path} held a run that had stopped before its first step; it was replaced")
        for check in machine:
            logger.say(f"machine: {check.name}: {check.found}; {check.fix}")
        start = info.step if info else 0
        for warning in keep_sources(run, recipe.model_dump(mode="json"), recipe.runs_dir):
            logger.warn(warning, step=start)
        with_health = {"health": recipe.health.model_dump(mode="json")}
        logger.event("start" if run.attempt == 1 else "resume", f"at step {start}", step=start, **with_health)
        began = run.manifest().get("cwd", "")
        if run.attempt > 1 and began != str(Path.cwd()):
            logger.say(
                f"the run began in {began} and continues in {Path.cwd()}: relative paths of its recipe now refer to the latter"
            )
        for line in run.manifest().get("allowed", ()):
            logger.warn(f"let through: {line}")
        for note in info.notes if info else ():
            logger.warn(note)
        for name in set_aside(run.path, start) if info else ():
            logger.warn(f"a checkpoint after step {start} was set aside as {name}: its steps are repeated")
        if (saved := _last_saved(run)) > start:  # allowed; resumes from here on need no further permission
            logger.event("fallback", f"to step {start}: the checkpoint of step {saved} is given up", step=start)
        ready = ready or preflight(recipe)
        material = ready.material
        parts = _build(recipe, logger, info, ready, stack)
        frozen = parts.learner.fingerprint(frozen=True)
        if material is None or recipe.sft is None:
            train(parts, recipe, logger, start)
        else:
            sft.train(parts, recipe, _sft_rows(parts, recipe, recipe.sft, material, logger), logger, start)
        if frozen.tensors:
            line = require_unchanged(frozen, parts.learner.fingerprint(frozen=True))
            logger.event("base", line, fingerprint=frozen.combined)
            logger.say(line)
        _finish(run, parts, recipe, logger)
    except LockstepError as error:
        with suppress(StorageError):  # the error itself, if the disk is full
            logger.event("stopped", str(error), error=type(error).__name__)
            logger.note(f"stopped: {error}")  # the command prints it
        if isinstance(error, HealthStop):  # nothing is broken: existing data is readable
            logger.say(f"report: {write_report(run.path)}")
        raise
    finally:
        stack.close()
        logger.close()


def _build(recipe: Recipe, logger: RunLogger, info: CheckpointInfo | None, ready: Ready, stack: ExitStack) -> Parts:
    task, begin = ready.task, time.monotonic()
    load_opponents(task, recipe)
    task.keep_in(logger.run.path)
    for line in (*plan_lines(recipe), *ready.notes):
        logger.note(line)
    check_disk(recipe, logger.run.path, logger.note)
    weights, state = read_weights(info) if info else (None, None)
    parts = place_parts(recipe, task, logger.run.path, stack, weights, logger.note)
    logger.say(f"ready: checks took {ready.seconds:.1f} s, model and engine {time.monotonic() - begin:.1f} s")
    if state is not None:
        restore(parts, state, known_recipes(logger.run, recipe))
        logger.say(f"resumed from step {state.step}: every file verified, weights {state.meta['fingerprint']}")
    elif parts.policy.parent is not None:
        _say_parent(parts, parts.policy.parent, logger)
    _describe(parts, recipe, logger, ready)
    return parts


def _describe(parts: Parts, recipe: Recipe, logger: RunLogger, ready: Ready) -> None:
    """Report what a reader must know to judge the run, on the console and in the manifest."""
    policy, learner = parts.policy, parts.learner.describe()
    batch, rates = batch_lines(recipe), rate_lines(recipe)
    logger.say(f"model {policy.resolved.name} in {policy.numerics} on {learner.device}")
    for line in (*learner.lines[:1], batch[0], *rates, *parts.task.notes[:3], *numerics_lines(parts, recipe)):
        logger.say(line)
    shown = [policy.chat.preview(one.messages, one.tools) for one in ready.prompts[:1]]
    details = [
        *parts.task.notes,
        *policy.chat.notes,
        *(policy.chat.continuation().notes if parts.task.plays else ()),
        *learner.lines[1:],
        *batch[1:],
        *health_lines(recipe),
        *(noise_lines(recipe, parts.noise) if parts.noise is not None else ()),
        *parts.objective.formula.splitlines(),
        *(f"first prompt, as the model sees it:\n{text}" for text in shown),
    ]
    logger.note("\n".join(details))
    logger.say(f"details and the first prompt: {logger.run.log_path}")
    facts = {
        "threads": torch.get_num_threads(),
        "formula": parts.objective.formula,
        "batch": "\n".join(batch),
        "template_hash": policy.chat.template_hash,
        "questions_hash": questions_hash(parts.task, began_with(recipe, logger.run)),
        "heldout_hash": data_hash(ready.heldout),
        "numerics": policy.numerics,
        "computes": {phase: recipe.numerics.label(phase, policy.numerics) for phase in PHASES},
        "task_notes": list(parts.task.notes),
    }
    require_same_data(logger.run.manifest(), facts)
    logger.run.add_to_manifest(facts)


def _say_parent(parts: Parts, parent: Parent, logger: RunLogger) -> None:
    """Report the origin of the weights, on the console and in the manifest."""
    logger.say(
        f"warm start from {parent.line}: every file verified, the weights proven; steps, optimizer and schedule start from zero "
        f"(to continue that run itself: lockstep train --resume {parent.run or 'RUN'})"
    )
    if parts.objective.needs_reference and parent.trained != "none":
        logger.warn("the reference policy is the base without adapters, not the weights of the warm start")
    logger.event("warm_start", parent.line, step=0, fingerprint=parent.fingerprint)
    logger.run.add_to_manifest({"parent": parent.lineage})


def _sft_rows(parts: Parts, recipe: Recipe, settings: Sft, material: Material, logger: RunLogger) -> SftRows:
    """Return the rows as tokens, and report on them on the console and in the manifest."""
    rows = tokenised(material, parts.policy.chat, settings, parts.policy.context)
    lines = [*material.notes, *rows.notes, f"first row, ⟦what carries loss⟧:\n{preview(rows, parts.policy.chat)}"]
    for line in lines:
        logger.say(line)
    if left := len(material.train) - len(rows.train):
        passes = recipe.steps / (len(rows.train) // settings.sequences_per_step)
        logger.warn(f"{left} rows are left out, so the {recipe.steps} steps are {passes:.3g} passes over the rest")
    facts = {"origin": material.origin, "content_hash": material.content_hash, "train": len(rows.train)}
    facts |= {"validation": len(rows.validation), "dropped": rows.dropped, "truncated": rows.truncated}
    require_same_data(logger.run.manifest(), {"sft": facts})
    logger.run.add_to_manifest({"sft": {**facts, "notes": [*material.notes, *rows.notes]}})
    return rows


def _finish(run: RunDirectory, parts: Parts, recipe: Recipe, logger: RunLogger) -> None:
    proof = parts.sync.verify(parts.learner, parts.engine)
    rows = read_metrics(run)
    last = rows[-1].step
    logger.event("verified", "all tensors and the probe, at the end", step=last, fingerprint=proof.fingerprint)
    for line in final_table(recipe, logger):
        logger.say(line)
    if line := grading_line(rows):
        logger.say(line)
    path = write_report(run.path)
    logger.event("finished", str(path.name), step=last)
    logger.say(f"report: {path}")
