"""Predicts the memory and the least time of a recipe without running it. The model must be here, the GPU need not be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lockstep.algorithms.build import Objective, build_objective
from lockstep.config.schema import Colocated, Local, Model, Recipe, Sft, Split
from lockstep.errors import DoesNotFitError, ModelError
from lockstep.memory import main_memory
from lockstep.models.builtin import BUILTINS, builtin_place
from lockstep.models.resolve import HUB_ID, hub_config
from lockstep.plan.choice import MemoryPlan, memory_lines, plan_memory
from lockstep.plan.devices import worker_lines
from lockstep.plan.disk import DiskPlan, Share, disk_lines, forecast, shares
from lockstep.plan.floors import H200, Floor, Machine, Update, Work, optimizer_seconds, step_floor, train_seconds
from lockstep.plan.floors import table as floor_table
from lockstep.plan.memory_inputs import GIB, adapter_size, offloaded_bytes
from lockstep.plan.model_shape import meta_model, read_shape, recipe_shape
from lockstep.plan.shapes import ModelShape

ASSUMED_PROMPT = 512
"""Tokens of a prompt where no tokenizer has counted them."""
KNOWN_GPUS = (H200,)
SHOWN_PLACEMENTS = 5
"""Most placements of the same workers whose floors are compared."""


@dataclass(frozen=True, slots=True)
class Preview:
    """Sizes of a recipe's model and the device that it is planned for."""

    recipe: Recipe
    shape: ModelShape
    objective: Objective
    device: Literal["cuda", "cpu"]
    available: float
    """Free bytes of the device."""
    total: float
    """All bytes of it."""
    name: str
    disk: DiskPlan | None
    """None if the size of the adapter or of the optimizer's state cannot be told."""
    disks: list[Share]
    """Parts of it for the disks of runs_dir and paths.checkpoints."""
    host: float | None = None
    """Free bytes of main memory; None if the device is of another machine."""

    @staticmethod
    def of(recipe: Recipe, gpu_gib: float | None = None) -> Preview | None:
        """Return None for a model whose config is not known here. Raises ModelError for a damaged folder."""
        folder = config_folder(recipe.model)
        if folder is None:
            return None
        shape = recipe_shape(recipe, folder)
        device, available, total, name = planned_device(recipe, gpu_gib)
        if device == "cpu":  # its workers share it
            available, total = available / recipe.workers, total / recipe.workers
        disk = forecast(recipe, shape, device, folder)
        disks = [] if disk is None else shares(disk, Path(recipe.runs_dir), recipe.paths.disk(recipe.runs_dir))
        host = main_memory().free if gpu_gib is None else None
        return Preview(recipe, shape, build_objective(recipe), device, available, total, name, disk, disks, host)

    def memory(self) -> MemoryPlan:
        """Return the memory plan with prompts of an assumed length. Raises DoesNotFitError on a GPU without room."""
        return plan_memory(
            self.recipe,
            self.shape,
            self.device,
            self.available,
            prompt_tokens=ASSUMED_PROMPT,
            passes=self.objective.extra_passes,
            host=self.host,
        )

    def require_memory(self) -> None:
        """Raise DoesNotFitError on a GPU without room, and on a CPU with less memory than weights and optimizer state take."""
        recipe = self.recipe.model_copy(update={"allow": []})
        plan = replace(self, recipe=recipe).memory()
        least = next(phase.bytes for phase in plan.phases if phase.name == "save")
        if self.device == "cpu" and least > self.total:
            what = f"weights and optimizer state take {least / GIB:.1f} GiB, but this machine has {self.total / GIB:.1f} GiB"
            raise DoesNotFitError([what], where="memory plan", fix="use a smaller model, or set adapter.kind=lora")


def preview_lines(recipe: Recipe, gpu_gib: float | None = None) -> list[str]:
    """Return the memory plan, the forecast of the disk and the floor of a step, on a GPU of `gpu_gib` or on this device.

    Raises ModelError for a damaged model folder.
    """
    preview = Preview.of(recipe, gpu_gib)
    if preview is None:
        return [f"{recipe.model.path} is not on this machine: the plan is printed when a run has fetched it"]
    trained = f"rows of {recipe.sft.max_tokens} tokens, evaluated with " if recipe.sft is not None else ""
    workers = worker_lines(recipe)
    where = f"each worker: {preview.name}" if workers else preview.name
    head = f"on {where}, with {trained}prompts of {ASSUMED_PROMPT} tokens and replies of {recipe.rollout.max_tokens}"
    disk = disk_lines(preview.disk, preview.disks) if preview.disk is not None else []
    try:
        plan = preview.memory()
    except DoesNotFitError as error:
        return [*workers, head, *error.mistakes, *disk]
    return [*workers, head, *memory_lines(plan), *_floor_lines(preview), *disk]


def adapter_lines(recipe: Recipe) -> list[str]:
    """Return the layers that get an adapter and the parameters that are trained; nothing for full training.

    Settings that mean no layer are among the refusals.
    """
    if recipe.adapter.kind == "none":
        return []
    folder = None if recipe.model.trust_remote_code else config_folder(recipe.model)
    if folder is None:
        return [f"{recipe.adapter.kind}: its layers are not counted, since the model's config is not known here"]
    from lockstep.learner.adapter_targets import choose_targets, trained_share

    try:
        shape = read_shape(folder)
        chosen = choose_targets(meta_model(folder), recipe.adapter.targets)
    except ModelError:
        return []
    rank, added = adapter_size(recipe.adapter, shape)
    counts = Counter(name.rsplit(".", 1)[-1] for name in chosen.layers)
    layers = ", ".join(f"{count} {name}" for name, count in counts.items())
    on_experts = getattr(recipe.adapter, "expert_rank", 0)
    return [
        f"{recipe.adapter.kind} of rank {rank} on {len(chosen.layers)} layers: {layers}",
        *([f"of rank {on_experts} on {shape.experts} experts of each layer"] if on_experts else []),
        trained_share(added, shape.parameters),
        *chosen.notes,
    ]


def _floor_lines(preview: Preview) -> list[str]:
    """Return the least time of a step on a GPU whose rates are known."""
    recipe, objective = preview.recipe, preview.objective
    machine = next((known for known in KNOWN_GPUS if known.name in preview.name), None)
    if preview.device != "cuda" or machine is None:
        return []
    if recipe.sft is not None:
        return [_sft_floor(recipe, recipe.sft, preview.shape, machine)]
    full = "full training" if recipe.adapter.kind == "none" else "adapters"
    floor = recipe_floor(
        recipe, preview.shape, machine, old=objective.recomputes_old, reference=objective.needs_reference
    )
    workers = recipe.workers
    where = f"{workers} x {machine.name}" if workers > 1 else machine.name
    head = f"a step on {where} takes at least, with {full}:"
    return [head, *floor_table(floor), *([_placed(preview, machine)] if workers > 1 else [])]


def _placed(preview: Preview, machine: Machine) -> str:
    """Return the floors of a step with the same workers placed in other ways, the lowest first, and those without room."""
    workers, objective = preview.recipe.workers, preview.objective
    places: list[Colocated | Split] = [Split(train=t, rollout=workers - t) for t in range(1, workers)]
    floors, full = dict[str, float](), list[str]()
    for place in [*([Colocated(gpus=workers)] if preview.recipe.rollout.engine == "native" else []), *places]:
        recipe = preview.recipe.model_copy(update={"placement": place})
        name = "colocated" if isinstance(place, Colocated) else f"{place.train} + {place.rollout}"
        try:
            replace(preview, recipe=recipe).memory()
        except DoesNotFitError:
            full.append(name)
            continue
        floor = recipe_floor(
            recipe, preview.shape, machine, old=objective.recomputes_old, reference=objective.needs_reference
        )
        floors[name] = floor.total
    best = ", ".join(
        f"{name} {floors[name]:.2f} s" for name in sorted(floors, key=floors.__getitem__)[:SHOWN_PLACEMENTS]
    )
    return f"placements of {workers} GPUs (train + rollout): {best}" + (f"; no room: {', '.join(full)}" if full else "")


def _sft_floor(recipe: Recipe, sft: Sft, shape: ModelShape, machine: Machine) -> str:
    """Return the least time of a step whose rows are as long as they may be, and all of which carry loss."""
    work, update = Work.equal(sft.sequences_per_step, 1, 0, sft.max_tokens), _update_of(recipe, shape)
    seconds, optimizer = train_seconds(shape, work, update, machine), optimizer_seconds(update, machine)
    tokens = sft.sequences_per_step * sft.max_tokens
    return (
        f"a step of {tokens} tokens on {machine.name} takes at least {seconds + optimizer:.2f} s "
        f"(train {seconds:.2f}, optimizer {optimizer:.3f})"
    )


def recipe_floor(recipe: Recipe, shape: ModelShape, machine: Machine, *, old: bool, reference: bool) -> Floor:
    """Return the least time of a step in which every prompt has ASSUMED_PROMPT tokens and every reply is as long as it may be."""
    work = Work.equal(recipe.prompts_per_step, recipe.samples_per_prompt, ASSUMED_PROMPT, recipe.rollout.max_tokens)
    update = _update_of(recipe, shape, old=old, reference=reference)
    whole, place = step_floor(shape, work, update, machine), recipe.placement
    if isinstance(place, Local):
        return whole
    prompts = -(-recipe.prompts_per_step // recipe.engines)  # of one engine: all of a prompt's samples
    own = Work.equal(prompts, recipe.samples_per_prompt, ASSUMED_PROMPT, recipe.rollout.max_tokens)
    shared = {name: getattr(whole, name) / place.trainers for name in ("old", "reference", "train", "optimizer")}
    return replace(step_floor(shape, own, update, machine), **shared)


def _update_of(recipe: Recipe, shape: ModelShape, *, old: bool = False, reference: bool = False) -> Update:
    full = recipe.adapter.kind == "none"
    return Update(
        shape.parameters if full else adapter_size(recipe.adapter, shape)[1],
        adapter=not full,
        share_prompts=recipe.update.share_prompts,
        old=old,
        reference=reference,
        offloaded=offloaded_bytes(recipe, shape),
    )


def folder_here(model: Model) -> Path | None:
    """Return the folder of a model that is on this machine already; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if model.path in BUILTINS:
        folder = builtin_place(model.path)
        return folder if (folder / "config.json").is_file() else None
    folder = Path(model.path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    try:
        found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:  # no such id could be
        return None
    return Path(found).parent if isinstance(found, str) else None


def weights_here(model: Model) -> Path | None:
    """Return the folder of a model whose weights are on this machine; of a hub model a plan fetches config.json alone."""
    folder = folder_here(model)
    if folder is None or model.path in BUILTINS or Path(model.path).expanduser().exists():
        return folder
    return folder if any(folder.glob("*.safetensors")) else None


def config_folder(model: Model) -> Path | None:
    """Return a folder with the model's config.json. If a hub model is not here, this one file is fetched."""
    folder = folder_here(model)
    if folder is not None or model.path in BUILTINS or not HUB_ID.fullmatch(model.path):
        return folder
    return hub_config(model.path, model.revision)


def planned_device(recipe: Recipe, gpu_gib: float | None = None) -> tuple[Literal["cuda", "cpu"], float, float, str]:
    """Return kind, free bytes, all bytes and name of the device that the plan is for."""
    if gpu_gib is not None:
        name = f"a GPU of {gpu_gib:g} GiB{' (H200)' if 135 <= gpu_gib <= 142 else ''}"
        return "cuda", gpu_gib * GIB, gpu_gib * GIB, name
    from lockstep.device import gpu_memory, gpus, has_gpu

    if recipe.device != "cpu" and has_gpu():
        free, total, _ = gpu_memory()
        return "cuda", free, total, gpus()[0].name
    memory = main_memory()
    return "cpu", memory.free, memory.total, "this machine's CPU"
