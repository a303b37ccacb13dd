"""Builds the parts of a run where its recipe places them: in this process, or on workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lockstep.algorithms.build import build_objective
from lockstep.build.build import build_parts, connect
from lockstep.build.memory import plan_run, planned
from lockstep.build.parts import Carried, Meanwhile, Parts, PolicyFacts
from lockstep.build.warm_start import find_parent
from lockstep.chat.chat import ChatFormat
from lockstep.checkpoint.state import write_tensors
from lockstep.cluster.group import GroupCritic, GroupLearner, GroupSync
from lockstep.cluster.group_engine import GroupEngine
from lockstep.cluster.host import TRAINER
from lockstep.cluster.process_workers import ProcessWorkers, Workers
from lockstep.cluster.sampler import Facts
from lockstep.cluster.samplers import Samplers
from lockstep.cluster.wire import GIVEN
from lockstep.config.schema import Colocated, Local, Recipe, Split
from lockstep.config.vllm import Vllm
from lockstep.device import GpuPeak, choose_device, keep_objects
from lockstep.errors import DEFECT, SyncError
from lockstep.models import ResolvedModel, load_tokenizer, resolve
from lockstep.plan.batch import placement_lines
from lockstep.plan.devices import require_devices
from lockstep.tasks.base import BuiltTask

FOLDER = "workers"
"""Folder of a run for its workers' logs and stacks."""
OBJECTS = 50_000
"""New objects after which the driver looks for garbage: 512 replies make some ten thousand, and the workers wait meanwhile."""


def place_parts(
    recipe: Recipe,
    task: BuiltTask,
    folder: Path,
    stack: ExitStack,
    weights: Mapping[str, Tensor] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Parts:
    """Build all parts of a training run; see `build_parts`. `folder` is the run's; processes started end with `stack`."""
    if isinstance(recipe.placement, Local):
        return build_parts(recipe, task, weights, say)
    require_devices(recipe)
    placement, objective, settings = recipe.placement, build_objective(recipe), recipe.algorithm.critic
    resolved, started = start_workers(recipe, placement, folder / FOLDER, stack)
    workers, everyone = Workers(started, range(placement.trainers)), Workers(started, range(started.size))
    free = min(everyone.call("available", recipe.rollout.engine == "vllm")) if started.gpu else 0.0
    plan = plan_run(recipe, task, objective, say, free) if started.gpu else None
    chosen = recipe if plan is None else planned(recipe, plan)
    native = chosen.rollout.model_copy(update={"engine": "native", "vllm": Vllm()})  # those that train use no other
    both = (chosen.model_copy(update={"rollout": native}), chosen)
    text, sampling = (json.dumps(one.model_dump(mode="json")) for one in both)
    samplers = Samplers(started, everyone.ranks[workers.size :], workers, sampling) if placement.samplers else None
    given = started.folder / GIVEN
    if weights is not None:
        write_tensors(given, weights)
    workers.start(range(workers.size), "build", text, weights is not None)
    if samplers is not None:  # at the same time
        samplers.start(range(samplers.size), "build", sampling, weights is not None)
    facts: Facts = workers.collect(range(workers.size), "build")[0]
    if samplers is not None:
        samplers.collect(range(samplers.size), "build", sampling, weights is not None)
    given.unlink(missing_ok=True)
    learns, meanwhile = replace(facts.learner, lines=(*facts.learner.lines, *placement_lines(recipe))), Meanwhile()
    pushes = recipe.loop == "rl" and recipe.updates_per_step == 1 and settings is None and samplers is None
    engine = GroupEngine(samplers or workers, recipe)
    return Parts(
        connected(recipe, task, resolved, facts),
        task,
        engine,
        objective,
        GroupLearner(workers, learns, meanwhile, pushes=pushes),
        None if settings is None else GroupCritic(workers, joint=settings.backbone == "shared"),
        GroupSync(workers, samplers),
        Carried.at_start(recipe),
        plan,
        facts.noise,
        started.phase_seconds,
        lambda: GpuPeak(*map(max, zip(*workers.call("gpu_peak"), strict=True))) if started.gpu else None,
        meanwhile,
        engine.begin if pushes else None,
        beside=recipe.rollout.deal != "queue",
    )


def start_workers(
    recipe: Recipe, placement: Colocated | Split, folder: Path, stack: ExitStack, trainer: str = TRAINER
) -> tuple[ResolvedModel, ProcessWorkers]:
    """Start the processes of a placement, which end with `stack`; returns the model, too. `trainer`: class of the first ones."""
    resolved = resolve(recipe.model)  # downloads are made once, before the workers look
    started = ProcessWorkers(placement, folder, gpu=choose_device(recipe.device).type == "cuda", trainer=trainer)
    stack.callback(started.close)
    stack.callback(keep_objects(OBJECTS))
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
