"""Starting and resuming a run: everything around the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.checkpoint.store import CheckpointInfo, list_checkpoints, open_checkpoint, set_aside
from lockstep.config.load import dump, load
from lockstep.config.numerics import PHASES
from lockstep.config.schema import Recipe, Sft
from lockstep.data.questions import data_hash
from lockstep.doctor.check import Check
from lockstep.doctor.run import require_machine
from lockstep.envs.driver import plays
from lockstep.errors import CheckpointError, HealthStop, LockstepError
from lockstep.evaluate.plan import eval_plan, plan_lines
from lockstep.evaluate.runner import heldout_items
from lockstep.health.rules import health_lines
from lockstep.learner.adapters import describe
from lockstep.loops import sft
from lockstep.loops.base import frozen_print, require_unchanged
from lockstep.loops.disk import check_disk
from lockstep.loops.evaluation import final_table
from lockstep.loops.forward import numerics_lines
from lockstep.loops.journal import Journal
from lockstep.loops.measures import grading_line
from lockstep.loops.noise import describe_noise
from lockstep.loops.parts import Parts, build_parts
from lockstep.loops.preflight import Ready, preflight
from lockstep.loops.questions import questions_hash, require_same_data
from lockstep.loops.rivals import pinned_rivals, seat_rivals
from lockstep.loops.rl import train
from lockstep.loops.rollouts import check_pool, check_prompts
from lockstep.loops.sampling import round_prompts
from lockstep.loops.sft_rows import Material, SftRows, preview, refuse_asked, tokenised, with_steps
from lockstep.loops.state import read_weights, restore
from lockstep.loops.warm import Parent, pinned
from lockstep.loops.watch import last_evaluated
from lockstep.plan.batch import batch_lines
from lockstep.plan.fit import require_fit
from lockstep.plan.schedule import rate_lines
from lockstep.report.html import write_report
from lockstep.track.rundir import RunDirectory, manifest_facts, refuse_taken
from lockstep.track.sinks import check_installed
from lockstep.track.writer import read_events, read_metrics
from lockstep.types import Prompt
from lockstep.verifiers.base import keep_in


def start_run(recipe: Recipe) -> RunDirectory:
    """Train a recipe from the beginning in a new run directory. Raises LockstepError; the directory then says why."""
    check_installed(recipe.track)
    warned = require_machine(recipe)
    require_fit(recipe)
    refuse_taken(Path(recipe.runs_dir) / recipe.name)
    recipe = with_steps(pinned_rivals(pinned(recipe)))
    ready = preflight(recipe)  # what fails here costs no run directory
    run = RunDirectory.create(Path(recipe.runs_dir) / recipe.name, dump(recipe), manifest_facts())
    with run:
        _run(run, recipe, None, warned, ready)
    return run


def resume_run(path: Path, health: Sequence[str] = (), *, allow_fallback: bool = False) -> RunDirectory:
    """Continue a run from its newest intact checkpoint, or from the beginning if it has none yet.

    `health`: overrides of settings of health, which change no number of the run; they stay with it.
    """
    if health:  # a mistake in them must not cost an attempt
        load([str(RunDirectory.open(path).recipe_path), *health])
    run = RunDirectory.resume(path, manifest_facts())
    with run:
        recipe = load([str(run.recipe_path), *health])
        if health:
            run.replace_recipe(dump(recipe))
        _run(run, recipe, _newest(run, allow_fallback), require_machine(recipe))
    return run


def _newest(run: RunDirectory, allow_fallback: bool) -> CheckpointInfo | None:
    """The checkpoint to go on from; None to begin. Raises CheckpointError for one that is damaged, or that somebody removed."""
    # A damaged checkpoint is there, too: only what a killed save left (a hidden folder) is not.
    there = [info for info in list_checkpoints(run.path) if info.complete or not info.path.name.startswith(".")]
    info = open_checkpoint(run.path, allow_fallback=allow_fallback) if there else None
    saved = [event.step for event in read_events(run) if event.kind == "checkpoint" and event.step is not None]
    if saved and saved[-1] > (info.step if info else 0) and not allow_fallback:
        begin = f"from step {info.step}" if info else "from the beginning"
        raise CheckpointError(
            f"the checkpoint of step {saved[-1]}, the last that was saved, is not there",
            where=str(run.checkpoints_path),
            fix=f"put it back, or go on {begin} with --allow-fallback",
        )
    return info


def _run(
    run: RunDirectory, recipe: Recipe, info: CheckpointInfo | None, machine: list[Check], ready: Ready | None = None
) -> None:
    journal = Journal(run, recipe)
    try:
        if run.replaced:
            journal.say(f"{run.path} held a run that had stopped before its first step; it was replaced")
        for check in machine:
            journal.say(f"machine: {check.name}: {check.found}; {check.fix}")
        start = info.step if info else 0
        with_health = {"health": recipe.health.model_dump(mode="json")}
        journal.event("start" if run.attempt == 1 else "resume", f"at step {start}", step=start, **with_health)
        began = run.manifest().get("cwd", "")
        if run.attempt > 1 and began != str(Path.cwd()):
            journal.say(
                f"the run began in {began} and goes on in {Path.cwd()}: relative paths of its recipe are of the latter"
            )
        for note in info.notes if info else ():
            journal.warn(note)
        for name in set_aside(run.path, start) if info else ():
            journal.warn(
                f"a checkpoint after step {start} was set aside as checkpoints/{name}: its steps are made again"
            )
        ready = ready or preflight(recipe)
        material = ready.material
        parts = _build(recipe, journal, info, ready)
        base = frozen_print(parts.policy.model)
        if material is None or recipe.sft is None:
            train(parts, recipe, journal, start)
        else:
            sft.train(parts, recipe, _sft_rows(parts, recipe, recipe.sft, material, journal), journal, start)
        require_unchanged(parts.policy.model, base, journal)
        _finish(run, parts, recipe, journal)
    except LockstepError as error:
        journal.event("stopped", str(error), error=type(error).__name__)
        journal.note(f"stopped: {error}")  # who started the run prints it
        if isinstance(error, HealthStop):  # nothing is broken: what is there can be read
            journal.say(f"report: {write_report(run.path)}")
        raise
    finally:
        journal.close()


def _build(recipe: Recipe, journal: Journal, info: CheckpointInfo | None, ready: Ready) -> Parts:
    task = ready.task
    seat_rivals(task, recipe)
    keep_in(task, journal.run.path)
    for line in (*plan_lines(recipe), *ready.notes):
        journal.note(line)
    check_disk(recipe, journal.run.path, journal.note)
    weights, state = read_weights(info) if info else (None, None)
    parts = build_parts(recipe, task, weights, journal.note)
    if state is not None:
        restore(parts, state, recipe)
        journal.say(f"resumed from step {state.step}: every file verified, weights {state.meta['fingerprint']}")
    elif parts.policy.parent is not None:
        _say_parent(parts, parts.policy.parent, journal)
    prompts = round_prompts(task, recipe, 0, 0, (), 0) if recipe.loop == "rl" else []
    check_prompts(parts.policy.chat, prompts, recipe.rollout.max_tokens, parts.policy.context)
    if recipe.loop == "rl" and info is None:
        check_pool(parts.policy.chat, task, recipe.rollout.max_tokens, parts.policy.context)
    reply = recipe.eval.max_tokens or recipe.rollout.max_tokens
    check_prompts(parts.policy.chat, _heldout(parts, recipe), reply, parts.policy.context)
    _describe(parts, recipe, journal, prompts)
    return parts


def _heldout(parts: Parts, recipe: Recipe) -> list[Prompt]:
    if not recipe.eval.enabled:
        return []
    plans = [eval_plan(recipe, parts.policy.numerics, chosen=chosen) for chosen in recipe.eval.sets]
    return [prompt for plan in plans for prompt in heldout_items(parts.task, plan)]


def _describe(parts: Parts, recipe: Recipe, journal: Journal, prompts: list[Prompt]) -> None:
    """What a reader must know to judge the run, on the console and in the manifest."""
    policy = parts.policy
    batch, rates = batch_lines(recipe), rate_lines(recipe)
    adapter = describe(recipe.adapter, policy.model).splitlines()
    journal.say(f"model {policy.resolved.name} in {policy.numerics} on {next(policy.model.parameters()).device}")
    for line in (*adapter[:1], batch[0], *rates, *parts.task.notes[:3]):
        journal.say(line)
    shown = [policy.chat.preview(one.messages, one.tools) for one in prompts[:1]]
    journal.note("\n".join([
        *parts.task.notes,
        *policy.chat.notes,
        *(policy.chat.continuation().notes if plays(parts.task) else ()),
        *parts.learner.notes,
        *adapter[1:],
        *batch[1:],
        *health_lines(recipe),
        *numerics_lines(parts, recipe),
        *describe_noise(parts, recipe),
        *parts.objective.formula.splitlines(),
        *(f"first prompt, as the model sees it:\n{text}" for text in shown),
    ]))  # fmt: skip
    journal.say(f"details and the first prompt: {journal.run.log_path}")
    facts = {
        "threads": torch.get_num_threads(),
        "formula": parts.objective.formula,
        "batch": "\n".join(batch),
        "template_hash": policy.chat.template_hash,
        "questions_hash": questions_hash(parts.task, recipe),
        "heldout_hash": data_hash(_heldout(parts, recipe)),
        "numerics": policy.numerics,
        "computes": {phase: recipe.numerics.label(phase, policy.numerics) for phase in PHASES},
        "task_notes": list(parts.task.notes),
    }
    require_same_data(journal.run.manifest(), facts)
    journal.run.add_to_manifest(facts)


def _say_parent(parts: Parts, parent: Parent, journal: Journal) -> None:
    """Where the weights are from, on the console and in the manifest."""
    journal.say(
        f"warm start from {parent.line}: every file verified, the weights proven; steps, optimizer and schedule begin anew "
        f"(to go on with that run itself: lockstep train --resume {parent.run or 'RUN'})"
    )
    if parts.objective.needs_reference and parent.trained != "none":
        journal.warn("the reference policy is the base without adapters, not the weights of the warm start")
    journal.event("warm_start", parent.line, step=0, fingerprint=parent.fingerprint)
    journal.run.add_to_manifest({"parent": parent.lineage})


def _sft_rows(parts: Parts, recipe: Recipe, settings: Sft, material: Material, journal: Journal) -> SftRows:
    """The rows as tokens, and what a reader must know of them, on the console and in the manifest."""
    refuse_asked(material, _heldout(parts, recipe))
    rows = tokenised(material, parts.policy.chat, settings, parts.policy.context)
    lines = [*material.notes, *rows.notes, f"first row, ⟦what carries loss⟧:\n{preview(rows, parts.policy.chat)}"]
    for line in lines:
        journal.say(line)
    facts = {"origin": material.origin, "content_hash": material.content_hash, "train": len(rows.train)}
    facts |= {"validation": len(rows.validation), "dropped": rows.dropped, "truncated": rows.truncated}
    require_same_data(journal.run.manifest(), {"sft": facts})
    journal.run.add_to_manifest({"sft": {**facts, "notes": [*material.notes, *rows.notes]}})
    return rows


def _finish(run: RunDirectory, parts: Parts, recipe: Recipe, journal: Journal) -> None:
    proof = parts.sync.verify(parts.learner, parts.engine)
    last = last_evaluated(recipe, journal) if recipe.eval.enabled else recipe.steps
    journal.event("verified", "all tensors and the probe, at the end", step=last, fingerprint=proof.fingerprint)
    for line in final_table(recipe, journal):
        journal.say(line)
    if line := grading_line(read_metrics(run)):
        journal.say(line)
    path = write_report(run.path)
    journal.event("finished", str(path.name), step=last)
    journal.say(f"report: {path}")
