"""Memory and least time of a recipe without running it: for a GPU that need not be here, from a model that is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Model, Recipe, Sft
from lockstep.errors import DoesNotFitError
from lockstep.models.builtin import BUILTINS, LAYOUT
from lockstep.models.cache import cache_root
from lockstep.plan.adapter import adapter_size
from lockstep.plan.choice import memory_lines, plan_memory
from lockstep.plan.disk import beside_bytes, disk_lines, free_bytes, plan_disk, require_room
from lockstep.plan.floors import ADAMW_BYTES, H200, Floor, Machine, Update, Work, step_floor, train_seconds
from lockstep.plan.floors import table as floor_table
from lockstep.plan.memory import GIB
from lockstep.plan.shapes import ModelShape, read_shape

ASSUMED_PROMPT = 512
"""Tokens of a prompt where no tokenizer has counted them."""
KNOWN_GPUS = (H200,)


def preview_lines(recipe: Recipe, gpu_gib: float | None = None) -> list[str]:
    """The memory plan and the floor of a step, on a GPU of `gpu_gib` or on this machine's device.

    A recipe that has no room is said to have none; nothing is raised for it. Raises ModelError for a damaged model folder.
    """
    folder = folder_here(recipe.model)
    if folder is None:
        return [f"{recipe.model.path} is not on this machine: the plan is printed when a run has fetched it"]
    shape = read_shape(folder)
    device, available, name = planned_device(recipe, gpu_gib)
    objective = build_objective(recipe)
    trained = f"rows of {recipe.sft.max_tokens} tokens, evaluated with " if recipe.sft is not None else ""
    lines = [f"on {name}, with {trained}prompts of {ASSUMED_PROMPT} tokens and replies of {recipe.rollout.max_tokens}"]
    try:
        plan = plan_memory(
            recipe,
            shape,
            device,
            available,
            prompt_tokens=ASSUMED_PROMPT,
            passes=objective.recomputes_old or objective.needs_reference or objective.needs_values,
        )
    except DoesNotFitError as error:
        return [*lines, *error.mistakes, f"to fix: {error.fix}"]
    lines += memory_lines(plan)
    machine = next((known for known in KNOWN_GPUS if known.name in name), None)
    if device == "cuda" and machine is not None and recipe.sft is not None:
        lines.append(_sft_floor(recipe, recipe.sft, shape, machine))
    elif device == "cuda" and machine is not None:
        full = recipe.adapter.kind == "none"
        floor = recipe_floor(recipe, shape, machine, old=objective.recomputes_old, reference=objective.needs_reference)
        lines.append(f"a step on {machine.name} takes at least, with {'full training' if full else 'adapters'}:")
        lines += floor_table(floor)
    return lines


def disk_preview(recipe: Recipe, gpu_gib: float | None = None) -> list[str]:
    """What a run will take of the disk; nothing for a model that is not here or an adapter whose size cannot be told."""
    folder = folder_here(recipe.model)
    if folder is None or recipe.adapter.kind == "peft":
        return []
    plan = plan_disk(recipe, read_shape(folder), planned_device(recipe, gpu_gib)[0], beside_bytes(folder))
    where = Path(recipe.runs_dir)
    free = free_bytes(where)
    lines = disk_lines(plan, free)
    try:
        require_room(plan, free, where)
    except DoesNotFitError as error:
        return [*lines, *error.mistakes, f"to fix: {error.fix}"]
    return lines


def _sft_floor(recipe: Recipe, sft: Sft, shape: ModelShape, machine: Machine) -> str:
    """The least time of a step whose rows are as long as they may be, and all of which carry loss."""
    adapter = recipe.adapter.kind != "none"
    trained = shape.parameters if recipe.adapter.kind == "none" else adapter_size(recipe.adapter, shape)[1]
    work = Work.equal(sft.sequences_per_step, 1, 0, sft.max_tokens)
    seconds = train_seconds(shape, work, Update(trained, adapter=adapter), machine)
    optimizer = ADAMW_BYTES * trained / machine.bandwidth
    tokens = sft.sequences_per_step * sft.max_tokens
    return (
        f"a step of {tokens} tokens on {machine.name} takes at least {seconds + optimizer:.2f} s "
        f"(train {seconds:.2f}, optimizer {optimizer:.3f})"
    )


def recipe_floor(recipe: Recipe, shape: ModelShape, machine: Machine, *, old: bool, reference: bool) -> Floor:
    """The least time of a step in which every prompt has ASSUMED_PROMPT tokens and every reply is as long as it may be."""
    adapter = recipe.adapter
    trained = shape.parameters if adapter.kind == "none" else adapter_size(adapter, shape)[1]
    work = Work.equal(recipe.prompts_per_step, recipe.samples_per_prompt, ASSUMED_PROMPT, recipe.rollout.max_tokens)
    update = Update(
        trained,
        adapter=adapter.kind != "none",
        share_prompts=recipe.update.share_prompts,
        old=old,
        reference=reference,
    )
    return step_floor(shape, work, update, machine)


def folder_here(model: Model) -> Path | None:
    """The folder of a model that is on this machine already; nothing is fetched."""
    if model.path in BUILTINS:
        folder = cache_root() / "models" / f"{model.path}-{BUILTINS[model.path].sha256[:12]}-{LAYOUT}"
        return folder if (folder / "config.json").is_file() else None
    folder = Path(model.path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    return _hub_cache(model)


def _hub_cache(model: Model) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:  # no such id could be
        return None
    return Path(found).parent if isinstance(found, str) else None


def planned_device(recipe: Recipe, gpu_gib: float | None = None) -> tuple[Literal["cuda", "cpu"], float, str]:
    """Kind, bytes and name of what the plan is for."""
    if gpu_gib is not None:
        return "cuda", gpu_gib * GIB, f"a GPU of {gpu_gib:g} GiB{' (H200)' if 135 <= gpu_gib <= 142 else ''}"
    import psutil
    import torch

    if recipe.device != "cpu" and torch.cuda.is_available():
        return "cuda", float(torch.cuda.mem_get_info()[0]), torch.cuda.get_device_name()
    return "cpu", float(psutil.virtual_memory().available), "this machine's CPU"
