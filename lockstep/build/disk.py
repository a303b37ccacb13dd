"""Disk space of a run: forecast before it starts, and compared with the first checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.config.schema import Recipe
from lockstep.device import choose_device
from lockstep.errors import DEFECT, CheckpointError, ModelError
from lockstep.models import resolve
from lockstep.plan.disk import (
    DiskPlan,
    Share,
    disk_lines,
    forecast,
    free_bytes,
    judge_first,
    require_room,
    shares,
    size,
)
from lockstep.plan.memory_inputs import GIB
from lockstep.plan.model_shape import read_shape
from lockstep.track.places import checkpoints_of
from lockstep.types import Metrics


def planned_disk(recipe: Recipe, model: Path) -> DiskPlan | None:
    """Forecast the disk space; None for an unknown model, or a user's optimizer or method."""
    try:
        shape = read_shape(model)
    except ModelError:
        return None  # the memory plan has reported it
    device = "cuda" if choose_device(recipe.device).type == "cuda" else "cpu"
    return forecast(recipe, shape, device, model)  # type: ignore[arg-type]


def checkpoint_gib(recipe: Recipe, model: Path) -> float:
    """Return the planned size of a checkpoint; 0 if unknown."""
    plan = planned_disk(recipe, model)
    return 0.0 if plan is None else plan.checkpoint / GIB


def disk_metrics(run: Path) -> Metrics:
    return {"memory/disk_free_gib": min(free_bytes(run), free_bytes(checkpoints_of(run))) / GIB}


def check_disk(recipe: Recipe, run: Path, say: Callable[[str], None]) -> None:
    """Print the forecast. Raises DoesNotFitError if it does not fit; existing files of the run count as its own."""
    plan = planned_disk(recipe, resolve(recipe.model).path)
    if plan is None:
        return
    disks = [replace(one, free=one.free + _own(one)) for one in shares(plan, run, checkpoints_of(run))]
    for line in disk_lines(plan, disks):
        say(line)
    if "disk" not in recipe.allow:
        require_room(plan, disks)


def _own(share: Share) -> int:
    files = {path for folder in share.folders for path in folder.rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in files)


def check_first(recipe: Recipe, model: Path, checkpoint: Path) -> str:
    """Return a warning if the first checkpoint does not have the planned size, else "".

    Raises CheckpointError for one more than twice that size: it holds too much, such as the base beside an adapter.
    """
    plan = planned_disk(recipe, model)
    if plan is None:
        return ""
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    verdict, told = judge_first(plan, sum(sizes.values()))
    if verdict == "leak":
        largest = ", ".join(f"{name} {size(sizes[name])}" for name in sorted(sizes, key=lambda n: -sizes[n])[:3])
        raise CheckpointError(
            f"the checkpoint holds more than was trained: {told}; the largest files are {largest}",
            where=str(checkpoint),
            fix=DEFECT,
        )
    return told if verdict == "off" else ""
