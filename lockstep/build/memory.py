"""The memory plan of a run: made before the model is loaded, and compared with the real peak after the first steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.algorithms.build import Objective
from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Recipe
from lockstep.device import GpuPeak, choose_device, gpu_memory
from lockstep.errors import ModelError
from lockstep.learner.execution import Execution
from lockstep.memory import main_memory
from lockstep.models import ResolvedModel, load_tokenizer, resolve
from lockstep.plan.choice import MemoryPlan, compared, memory_lines, plan_memory
from lockstep.plan.memory_inputs import GIB
from lockstep.plan.model_shape import recipe_shape
from lockstep.types import Metrics, Task

CHECKED_STEP = 2
"""First step at which everything is allocated: optimizer moments exist from the end of the first step on."""


def plan_run(
    recipe: Recipe, task: Task, objective: Objective, say: Callable[[str], None], available: float | None = None
) -> MemoryPlan | None:
    """Plan, and print the plan as a table. Returns None for a model of unknown sizes: it is then loaded without a plan.
    `available`: bytes that the GPU of each worker has free; without it those of this process's device.

    Raises DoesNotFitError on a GPU without room, before any weights are loaded; ModelError if the model is missing.
    """
    device = choose_device(recipe.device)
    resolved = resolve(recipe.model)
    try:
        shape = recipe_shape(recipe, resolved.path)
    except ModelError as error:
        say(f"no memory plan: {error}")
        return None
    plan = plan_memory(
        recipe,
        shape,
        "cuda" if device.type == "cuda" else "cpu",
        available_bytes(device) if available is None else available,
        prompt_tokens=longest_prompt(resolved, recipe, task),
        passes=objective.extra_passes,
        host=main_memory().free,
    )
    for line in memory_lines(plan):
        say(line)
    return plan


def execution(plan: MemoryPlan | None) -> Execution | None:
    """Return the plan's decisions about an update. On a CPU they equal the defaults."""
    if plan is None or plan.inputs.device == "cpu":
        return None
    return Execution(plan.sizes.tokens, plan.sizes.recompute)


def rows_of_engine(recipe: Recipe, device: str, plan: MemoryPlan | None) -> int:
    """Return the number of sequences that the native engine decodes together: the recipe's number, or the plan's if that is
    auto.

    The recipe's number stands even if the plan found room for fewer: the engine then takes the available memory, and the rest
    waits.
    """
    if recipe.rollout.slots == "auto" and plan is not None:
        return plan.sizes.slots
    return recipe.slots(device)


def planned(recipe: Recipe, plan: MemoryPlan) -> Recipe:
    """Return the recipe with the memory plan's choices, which must be the same on all workers."""
    sizes, rollout = plan.sizes, recipe.rollout
    update = recipe.update.model_copy(update={"tokens_per_microbatch": sizes.tokens, "recompute": sizes.recompute})
    if rollout.slots == "auto" and rollout.engine == "native":
        rollout = rollout.model_copy(update={"slots": sizes.slots})
    return recipe.model_copy(update={"update": update, "rollout": rollout})


def available_bytes(device: torch.device) -> float:
    """Return the bytes available to this process: free memory, and on a GPU also the memory that torch holds already."""
    if device.type != "cuda":
        return main_memory().free
    free, _, kept = gpu_memory(device)
    return free + kept


def longest_prompt(resolved: ResolvedModel, recipe: Recipe, task: Task) -> int:
    """Return the number of tokens of the longest prompt of the first step."""
    chat = ChatFormat(load_tokenizer(resolved), recipe.chat, None)
    lengths = (len(chat.render_prompt(prompt)) for prompt in task.batch(0, recipe.prompts_per_step))
    return max(lengths, default=0)  # a supervised run may have no task


def check_memory(plan: MemoryPlan | None, peak: GpuPeak | None, trained: int) -> tuple[Metrics, str]:
    """Return a GPU's peak so far beside the plan's, and a warning if the plan is off. `trained`: steps since the start."""
    if peak is None:
        return {}, ""
    freed = 0.0 if plan is None else plan.inputs.freed_cache
    metrics = {"memory/gpu_gib": peak.used / GIB, "memory/gpu_reserved_gib": peak.kept / GIB}
    metrics["memory/gpu_share"] = (peak.used - freed) / peak.total
    if plan is None or plan.inputs.device != "cuda" or plan.inputs.apart or trained < CHECKED_STEP:
        return metrics, ""
    planned, warning = compared(plan, peak.used)
    return metrics | planned, warning if trained == CHECKED_STEP else ""
