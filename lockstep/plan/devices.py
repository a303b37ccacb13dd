"""Compares the GPUs that the workers of a run need with those of this machine. Starts nothing, and uses no GPU memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from lockstep.config.schema import Local, Recipe
from lockstep.errors import ConfigError, MachineError

SMI_SECONDS = 10.0


def gpus_here() -> list[str]:
    """Return the names of the GPUs that this process may use, as nvidia-smi says. Raises MachineError if that hangs."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"nvidia-smi has not answered for {SMI_SECONDS:.0f} s, so it is not known which GPUs are here",
            fix="run nvidia-smi by hand: a GPU or its driver may be broken; persistence mode (nvidia-smi -pm 1) makes it fast",
        ) from error
    lines = done.stdout.splitlines() if not done.returncode else []
    found = [line.split(", ", 2) for line in lines if line.count(", ") > 1]
    places = visible([(index, uuid) for index, uuid, _ in found], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [found[place][2] for place in places]


def visible(gpus: Sequence[tuple[str, str]], chosen: str | None) -> list[int]:
    """Return the places of the GPUs (index, UUID) that CUDA_VISIBLE_DEVICES names, as CUDA reads it: up to a word that names
    none, such as -1; a UUID may be cut short. All if it is unset, or names parts of GPUs (MIG).
    """
    if chosen is None or "MIG-" in chosen:
        return [*range(len(gpus))]
    places: list[int] = []
    for word in (word.strip() for word in chosen.split(",")):
        named = [
            place
            for place, (index, uuid) in enumerate(gpus)
            if word == index or (word.startswith("GPU-") and uuid.startswith(word))
        ]
        if len(named) != 1:
            break
        places += named
    return places


def device_table(recipe: Recipe, here: list[str]) -> list[str]:
    """Return a line for each worker: its work, and its GPU."""
    place = recipe.placement
    if isinstance(place, Local):
        return []
    lines = ["worker  work               GPU"]
    for rank in range(recipe.workers):
        work = "samples" if rank >= place.trainers else "trains" if place.samplers else "trains and samples"
        lines.append(f"rank {rank:<2} {work:<18} {here[rank] if rank < len(here) else 'missing'}")
    return lines


def worker_lines(recipe: Recipe) -> list[str]:
    """Return what the memory plan is of, for a run on workers."""
    place = recipe.placement
    if isinstance(place, Local):
        return []
    own = f"1/{place.trainers} of masters and moments" if place.trainers > 1 else "masters and moments"
    lines = [f"each of {recipe.workers} workers holds the whole weights; a trainer {own}, gradients to send and to add"]
    if place.samplers:
        lines.append("phase generate is that of the samplers, which hold weights, keys and values alone")
    return lines


def require_devices(recipe: Recipe) -> None:
    """Raise ConfigError if a run frees memory of a GPU where there is none, or needs more GPUs than there are."""
    from lockstep.device import has_gpu

    if recipe.optimizer.offload == "cpu" and not has_gpu():
        what = "optimizer.offload=cpu frees GPU memory, but torch finds no GPU on this machine"
        raise ConfigError([what], fix="leave optimizer.offload out, or run on a machine with a GPU")
    require_gpus(recipe)


def require_gpus(recipe: Recipe, remedy: str = "reduce the workers in placement") -> None:
    """Raise ConfigError, with a table and the remedy, if workers on GPUs need more of them than there are."""
    needed = 0 if isinstance(recipe.placement, Local) else recipe.workers
    here = gpus_here() if needed and recipe.device != "cpu" else []
    if len(here) >= needed or (recipe.device != "cuda" and not here):
        return
    what = f"{needed} workers need a GPU each, and this machine has {len(here)}"
    fix = f"{remedy}, or use the CPU: device=cpu" if here else "use a machine with these GPUs, or the CPU: device=cpu"
    raise ConfigError([what, *device_table(recipe, here)], fix=fix)
