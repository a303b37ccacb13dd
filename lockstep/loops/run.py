"""Starting and resuming a run: everything around the loop."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.checkpoint.store import CheckpointInfo, list_checkpoints, open_checkpoint
from lockstep.config.load import dump, load
from lockstep.config.schema import Recipe
from lockstep.data.questions import data_hash
from lockstep.errors import LockstepError
from lockstep.evaluate.plan import plan_lines
from lockstep.learner.adapters import describe
from lockstep.loops.evaluation import final_table
from lockstep.loops.journal import Journal
from lockstep.loops.parts import Parts, build_parts, build_task_of
from lockstep.loops.rl import train
from lockstep.loops.rollouts import check_prompts
from lockstep.loops.sampling import round_prompts
from lockstep.loops.state import read_weights, restore
from lockstep.plan.batch import batch_lines
from lockstep.plan.schedule import rate_lines
from lockstep.report.html import write_report
from lockstep.track.rundir import RunDirectory, manifest_facts
from lockstep.track.sinks import check_installed
from lockstep.types import Prompt


def start_run(recipe: Recipe) -> RunDirectory:
    """Train a recipe from the beginning in a new run directory. Raises LockstepError; the directory then says why."""
    check_installed(recipe.track)
    run = RunDirectory.create(Path(recipe.runs_dir) / recipe.name, dump(recipe), manifest_facts())
    with run:
        _run(run, recipe, None)
    return run


def resume_run(path: Path, *, allow_fallback: bool = False) -> RunDirectory:
    """Continue a run from its newest intact checkpoint, or from the beginning if it has none yet."""
    run = RunDirectory.resume(path, manifest_facts())
    with run:
        recipe = load([str(run.recipe_path)])
        # A damaged checkpoint is there, too: only what a killed save left (a hidden folder) is not.
        there = [info for info in list_checkpoints(run.path) if info.complete or not info.path.name.startswith(".")]
        info = open_checkpoint(run.path, allow_fallback=allow_fallback) if there else None
        _run(run, recipe, info)
    return run


def _run(run: RunDirectory, recipe: Recipe, info: CheckpointInfo | None) -> None:
    journal = Journal(run, recipe)
    try:
        start = info.step if info else 0
        journal.event("start" if run.attempt == 1 else "resume", f"at step {start}", step=start)
        for note in info.notes if info else ():
            journal.warn(note)
        parts = _build(recipe, journal, info)
        train(parts, recipe, journal, start)
        _finish(run, parts, recipe, journal)
    except LockstepError as error:
        journal.event("stopped", str(error), error=type(error).__name__)
        journal.say(f"stopped: {error}")
        raise
    finally:
        journal.close()


def _build(recipe: Recipe, journal: Journal, info: CheckpointInfo | None) -> Parts:
    for line in plan_lines(recipe):
        journal.say(line)
    task = build_task_of(recipe)
    weights, state = read_weights(info) if info else (None, None)
    parts = build_parts(recipe, task, weights, journal.say)
    if state is not None:
        restore(parts, state, recipe)
        journal.say(f"resumed from step {state.step}: every file verified, weights {state.meta['fingerprint']}")
    prompts = round_prompts(task, recipe, 0, 0, (), 0)
    check_prompts(parts.policy.chat, prompts, recipe.rollout.max_tokens, parts.policy.context)
    reply = recipe.eval.max_tokens or recipe.rollout.max_tokens
    check_prompts(parts.policy.chat, _heldout(parts, recipe), reply, parts.policy.context)
    _describe(parts, recipe, journal, prompts)
    return parts


def _heldout(parts: Parts, recipe: Recipe) -> list[Prompt]:
    return list(parts.task.heldout(recipe.eval.role, recipe.eval.items)) if recipe.eval.enabled else []


def _describe(parts: Parts, recipe: Recipe, journal: Journal, prompts: list[Prompt]) -> None:
    """What a reader must know to judge the run, on the console and in the manifest."""
    policy = parts.policy
    batch = batch_lines(recipe)
    lines = [
        *parts.task.notes,
        *policy.chat.notes,
        *parts.learner.notes,
        f"model {policy.resolved.name} in {policy.numerics} on {next(policy.model.parameters()).device}",
        describe(recipe.adapter, policy.model),
        *batch,
        *rate_lines(recipe),
        *parts.objective.formula.splitlines(),
        f"first prompt, as the model sees it:\n{policy.chat.preview(prompts[0].messages)}",
    ]
    for line in lines:
        journal.say(line)
    journal.run.add_to_manifest(
        {
            "threads": torch.get_num_threads(),
            "formula": parts.objective.formula,
            "batch": "\n".join(batch),
            "template_hash": policy.chat.template_hash,
            "heldout_hash": data_hash(_heldout(parts, recipe)),
            "numerics": policy.numerics,
            "task_notes": list(parts.task.notes),
        }
    )


def _finish(run: RunDirectory, parts: Parts, recipe: Recipe, journal: Journal) -> None:
    proof = parts.sync.verify(parts.learner, parts.engine)
    journal.event("verified", "all tensors and the probe, at the end", step=recipe.steps, fingerprint=proof.fingerprint)
    for line in final_table(recipe, journal):
        journal.say(line)
    path = write_report(run.path)
    journal.event("finished", str(path.name), step=recipe.steps)
    journal.say(f"report: {path}")
