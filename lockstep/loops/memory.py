"""The memory plan of a run on its device: made before the model is loaded, checked when it has trained."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from lockstep.algorithms.build import Objective
from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Recipe
from lockstep.errors import ModelError
from lockstep.learner.device import choose_device
from lockstep.learner.execution import Execution
from lockstep.loops.journal import Journal
from lockstep.models import ResolvedModel, load_tokenizer, resolve
from lockstep.plan.choice import MemoryPlan, memory_lines, memory_metrics, plan_memory, plan_warning
from lockstep.plan.shapes import read_shape
from lockstep.types import Metrics, Task

CHECKED_STEP = 2
"""Moments exist from the end of the first step on: the second is the first that has everything."""


def plan_run(recipe: Recipe, task: Task, objective: Objective, say: Callable[[str], None]) -> MemoryPlan | None:
    """Plan, and print the plan as a table. None for a model whose sizes cannot be told: it is then loaded without a plan.

    Raises DoesNotFitError on a GPU without room, before any weights are loaded; ModelError if the model is not there.
    """
    device = choose_device(recipe.device)
    resolved = resolve(recipe.model)
    try:
        shape = read_shape(resolved.path)
    except ModelError as error:
        say(f"no memory plan: {error}")
        return None
    plan = plan_memory(
        recipe,
        shape,
        "cuda" if device.type == "cuda" else "cpu",
        available_bytes(device),
        prompt_tokens=longest_prompt(resolved, recipe, task),
        passes=objective.recomputes_old or objective.needs_reference or objective.needs_values,
    )
    for line in memory_lines(plan):
        say(line)
    return plan


def execution(plan: MemoryPlan | None) -> Execution | None:
    """What the plan decides of an update. On a CPU it decides nothing that its defaults would not."""
    if plan is None or plan.job.device == "cpu":
        return None
    return Execution(plan.sizes.tokens, plan.sizes.recompute)


def rows_of_engine(recipe: Recipe, device: str, plan: MemoryPlan | None) -> int:
    """Sequences that the native engine decodes side by side: the recipe's number, or, where that is auto, the plan's.

    A number stands even where the plan found room for fewer: the engine then takes what memory there is, and the rest waits.
    """
    if recipe.rollout.slots == "auto" and plan is not None:
        return plan.sizes.slots
    return recipe.slots(device)


def available_bytes(device: torch.device) -> float:
    """Bytes for this process: what is free, and on a GPU what torch holds already."""
    if device.type != "cuda":
        return float(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))


def longest_prompt(resolved: ResolvedModel, recipe: Recipe, task: Task) -> int:
    """Tokens of the longest prompt of the first step."""
    chat = ChatFormat(load_tokenizer(resolved), recipe.chat, None)
    lengths = (len(chat.render_prompt(prompt)) for prompt in task.batch(0, recipe.prompts_per_step))
    return max(lengths, default=0)  # a supervised run may have no task


def check_memory(plan: MemoryPlan | None, journal: Journal, step: int, trained: int) -> Metrics:
    """Prediction and error of a GPU's peak so far, with a warning if the plan is off. `trained`: steps since the start."""
    if plan is None or plan.job.device != "cuda" or trained < CHECKED_STEP:
        return {}
    peak = torch.cuda.max_memory_allocated()
    warning = plan_warning(plan, peak)
    if warning and trained == CHECKED_STEP:
        journal.warn(warning, step=step)
    return memory_metrics(plan, peak)
