"""Builds the parts of a run where its recipe places them: in this process, or on workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from torch import Tensor

from lockstep.algorithms.build import build_objective
from lockstep.build.build import build_parts, connect
from lockstep.build.memory import plan_run
from lockstep.build.parts import Carried, Parts, PolicyFacts
from lockstep.build.warm_start import find_parent
from lockstep.chat.chat import ChatFormat
from lockstep.checkpoint.state import write_tensors
from lockstep.cluster.group import GroupCritic, GroupEngine, GroupLearner, GroupSync
from lockstep.cluster.host import TRAINER
from lockstep.cluster.messages import START, Facts, Workers
from lockstep.cluster.plain import from_plain
from lockstep.cluster.process_workers import Part, ProcessWorkers
from lockstep.cluster.samplers import Samplers
from lockstep.config.schema import Colocated, Local, Recipe, Split
from lockstep.device import GpuPeak, choose_device
from lockstep.errors import DEFECT, SyncError
from lockstep.models import ResolvedModel, load_tokenizer, resolve
from lockstep.plan.batch import placement_lines
from lockstep.plan.choice import MemoryPlan
from lockstep.plan.devices import require_devices
from lockstep.tasks.base import BuiltTask
from lockstep.types import Metrics

FOLDER = "workers"
"""Folder of a run for its workers' logs and stacks."""
PHASES = {"sample": "rollout", "update": "update", "response_logprobs": "update", "push": "sync"}
"""Methods of a worker whose seconds are logged, and their phase."""


def restarts(recipe: Recipe) -> int:
    """Return how often a run may go on by itself after it lost a worker."""
    return recipe.placement.restarts if isinstance(recipe.placement, Colocated | Split) else 0


def place_parts(
    recipe: Recipe,
    task: BuiltTask,
    folder: Path,
    stack: ExitStack,
    weights: Mapping[str, Tensor] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Parts:
    """Build everything that a training run needs; see `build_parts`. Processes that are started end with `stack`.

    `folder` is that of the run.
    """
    match recipe.placement:
        case Local():
            return build_parts(recipe, task, weights, say)
        case Colocated() | Split():
            return _on_workers(recipe, recipe.placement, task, folder / FOLDER, stack, weights, say)
        case other:
            assert_never(other)


def _on_workers(
    recipe: Recipe,
    placement: Colocated | Split,
    task: BuiltTask,
    folder: Path,
    stack: ExitStack,
    weights: Mapping[str, Tensor] | None,
    say: Callable[[str], None],
) -> Parts:
    require_devices(recipe)
    objective, settings = build_objective(recipe), recipe.algorithm.critic
    trainers, total = placement.trainers, placement.trainers + placement.samplers
    resolved, started = start_workers(recipe, placement, folder, stack)
    gpu, workers = started.gpu, Part(started, range(trainers))
    plan = plan_run(recipe, task, objective, say, min(started.call("available"))) if gpu else None
    planned = recipe if plan is None else _planned(recipe, plan)
    text = json.dumps(planned.model_dump(mode="json"))
    samplers = None if trainers == total else Samplers(started, range(trainers, total), workers, text, folder)
    if weights is not None:
        write_tensors(folder / START, weights)
    found = workers.call("build", text, weights is not None)
    if samplers is not None:
        samplers.call("build", text, weights is not None)
    (folder / START).unlink(missing_ok=True)
    facts = from_plain(Facts, found[0])
    policy = connected(recipe, task, resolved, facts)
    lines = (*facts.learner.lines, *placement_lines(recipe))
    learner = GroupLearner(workers, replace(facts.learner, lines=lines), folder)
    return Parts(
        policy,
        task,
        group_engine(recipe, samplers or workers, folder, gpu=gpu),
        objective,
        learner,
        None if settings is None else GroupCritic(workers, folder, joint=settings.backbone == "shared"),
        GroupSync(workers, samplers),
        Carried.at_start(recipe),
        plan,
        facts.noise,
        lambda: _rank_seconds(started),
        (lambda: _largest_peak(workers)) if gpu else lambda: None,
    )


def start_workers(
    recipe: Recipe,
    placement: Colocated | Split,
    folder: Path,
    stack: ExitStack,
    trainer: str = TRAINER,
) -> tuple[ResolvedModel, ProcessWorkers]:
    """Start the processes of a placement, which end with `stack`; returns the model, too. `trainer`: class of the first ones."""
    resolved = resolve(recipe.model)  # downloads are made once, before the workers look
    total = placement.trainers + placement.samplers
    started = ProcessWorkers(
        placement.trainers,
        folder,
        gpu=choose_device(recipe.device).type == "cuda",
        timeout=placement.timeout_s,
        threads=max(1, (os.cpu_count() or total) // total),
        samplers=placement.samplers,
        spare=placement.restarts,
        trainer=trainer,
    )
    stack.callback(started.close)
    return resolved, started


def connected(recipe: Recipe, task: BuiltTask, resolved: ResolvedModel, facts: Facts) -> PolicyFacts:
    """Return what the driver knows of its workers' policy, and connect the task. Raises SyncError if their stop tokens differ."""
    tokenizer = load_tokenizer(resolved)
    chat = ChatFormat(tokenizer, recipe.chat, facts.stop_ids)
    policy = PolicyFacts(resolved, tokenizer, chat, facts.numerics, facts.context, find_parent(recipe))
    connect(task, policy)
    if chat.stop_ids != facts.stop_ids:
        what = f"the driver and the workers use different stop tokens: {chat.stop_ids} and {facts.stop_ids}"
        raise SyncError(what, where=str(resolved.path), fix=DEFECT)
    return policy


def group_engine(recipe: Recipe, workers: Workers, folder: Path, *, gpu: bool) -> GroupEngine:
    """Return the engines of these workers as one, with requests dealt as the recipe says."""
    rows = None
    if recipe.rollout.deal == "queue":
        rows = min(recipe.slots("cuda" if gpu else "cpu"), -(-recipe.samples_per_step // workers.size))
    return GroupEngine(workers, folder, rows)


def _planned(recipe: Recipe, plan: MemoryPlan) -> Recipe:
    """Return the recipe with the memory plan's choices, which must be the same on all workers."""
    sizes = plan.sizes
    update = recipe.update.model_copy(update={"tokens_per_microbatch": sizes.tokens, "recompute": sizes.recompute})
    rollout = (
        recipe.rollout.model_copy(update={"slots": sizes.slots}) if recipe.rollout.slots == "auto" else recipe.rollout
    )
    return recipe.model_copy(update={"update": update, "rollout": rollout})


def _largest_peak(workers: Workers) -> GpuPeak:
    used, kept = zip(*workers.call("gpu_peak"), strict=True)
    return GpuPeak(max(used), max(kept))


def _rank_seconds(workers: ProcessWorkers) -> Metrics:
    """Return what each worker spent on the phases of a step, and begin again at 0."""
    found: Metrics = {}
    for (rank, method), seconds in workers.spent.items():
        if method in PHASES:
            name = f"time/rank{rank}_{PHASES[method]}"
            found[name] = found.get(name, 0.0) + seconds
    workers.spent.clear()
    return found
