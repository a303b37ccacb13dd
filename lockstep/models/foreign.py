"""Finds the weights in a checkpoint folder of another trainer, for `lockstep import`. Does not import torch.

    verl       global_step_29/actor/{model_world_size_4_rank_0.pt …, fsdp_config.json, huggingface/, lora_adapter/}
    OpenRLHF   the folder of --save_path, or ckpt/_actor/{latest, global_step20/…_model_states.pt, global_step20_hf/}
    TRL        checkpoint-100/{model.safetensors | adapter_model.safetensors, trainer_state.json}

Sources: verl/utils/checkpoint/fsdp_checkpoint_manager.py, openrlhf/utils/deepspeed/deepspeed.py, transformers' Trainer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.models.folder import ADAPTER_TENSORS, INDEX, read_json

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
STEP = re.compile(r"(?:global_step_?|checkpoint-)(\d+)(_hf)?")
LEFT = ("optim_", "extra_state_", "optimizer", "scheduler", "rng_")
"""Beginnings of names of files that only the trainer itself can use."""


class Kind(StrEnum):
    """Storage of the weights."""

    FSDP = "FSDP shards of verl"
    ADAPTER = "an adapter in PEFT's layout"
    MODEL = "a model in safetensors"
    DEEPSPEED = "model states of DeepSpeed"


@dataclass(frozen=True, slots=True)
class Foreign:
    """Weights in another trainer's folder. Example: Foreign(Kind.FSDP, actor, actor/huggingface, 29, shards)"""

    kind: Kind
    path: Path
    """Folder of the weights."""
    config: Path | None
    """Folder of config.json and tokenizer; None for an adapter without either."""
    step: int
    """0 if the folder does not say."""
    shards: tuple[Path, ...] = ()
    """FSDP: by rank. DeepSpeed: the one file of model states."""
    beside: tuple[str, ...] = ()
    """Other files there, which are not imported."""


def find_foreign(path: Path, step: int | None = None) -> Foreign:
    """Find another trainer's weights in `path`: a step's folder, one inside it, or the folder of all steps.

    Raises CheckpointError, listing the steps, if there are several and none is asked for; or if nothing is known there.
    """
    if not path.is_dir():
        raise CheckpointError(
            "there is no such folder", where=str(path), fix="give the folder of a trainer's checkpoints"
        )
    if steps := _steps(path):
        return find_foreign(_chosen(path, steps, step))
    if step is not None and step != step_of(path):
        raise CheckpointError(
            f"this folder holds one step only, and not step {step}",
            where=str(path),
            fix="give the folder of all steps, or leave --step out",
        )
    for place in (path, path / "actor", path / "_actor"):
        if place != path and place.is_dir() and (inner := _steps(place)):
            return find_foreign(_chosen(place, inner, step))
        if found := _in(place, step_of(path)):
            return found
    names = ", ".join(sorted(one.name for one in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"the folder has no checkpoint of verl, OpenRLHF or TRL; it contains {names}",
        where=str(path),
        fix="give the folder of a step, such as global_step_29, global_step_29/actor or checkpoint-100",
    )


def step_of(path: Path) -> int:
    """Return the step from the names of the folder and those around it; 0 if they say nothing."""
    found = [int(match[1]) for part in path.resolve().parts if (match := STEP.fullmatch(part))]
    return found[-1] if found else 0


def _steps(path: Path) -> dict[int, Path]:
    """Return the folders of steps. OpenRLHF's Hugging Face copy of a step is preferred to its DeepSpeed states."""
    steps: dict[int, Path] = {}
    for inner in sorted(path.iterdir()) if path.is_dir() else []:
        match = STEP.fullmatch(inner.name)
        if match and inner.is_dir():
            steps[int(match[1])] = inner  # sorted: global_step20_hf comes after global_step20
    return steps


def _chosen(path: Path, steps: dict[int, Path], step: int | None) -> Path:
    listed = ", ".join(map(str, sorted(steps)))
    fix = f"choose one with --step, such as --step {max(steps)}"
    if step is None and len(steps) > 1:
        raise CheckpointError(f"the folder holds several steps: {listed}", where=str(path), fix=fix)
    wanted = step if step is not None else next(iter(steps))
    if wanted not in steps:
        raise CheckpointError(f"there is no step {wanted}, only {listed}", where=str(path), fix=fix)
    return steps[wanted]


def _in(place: Path, step: int) -> Foreign | None:
    if not place.is_dir():
        return None
    beside = tuple(sorted(path.name for path in place.iterdir() if path.name.startswith(LEFT)))
    for adapter in (place / "lora_adapter", place):
        if (adapter / ADAPTER_TENSORS).is_file():
            config = next(
                (p for p in (place / "huggingface", adapter) if (p / "tokenizer_config.json").is_file()), None
            )
            return Foreign(Kind.ADAPTER, adapter, config, step, beside=beside)
    if any(SHARD.fullmatch(path.name) for path in place.iterdir()):
        return Foreign(Kind.FSDP, place, place / "huggingface", step, _shards(place), beside)
    if (place / "model.safetensors").is_file() or (place / INDEX).is_file():
        return Foreign(Kind.MODEL, place, place, step, beside=beside)
    states = sorted(place.glob("*mp_rank_*_model_states.pt"))
    if states:
        config = next((p for p in (place, place.parent) if (p / "config.json").is_file()), None)
        return Foreign(Kind.DEEPSPEED, place, config, step, tuple(states), beside)
    return None


def _shards(place: Path) -> tuple[Path, ...]:
    """Return all ranks' files in order. Raises CheckpointError if one is missing or two world sizes are mixed."""
    found = {(int(m[1]), int(m[2])): p for p in place.iterdir() if (m := SHARD.fullmatch(p.name))}
    worlds = {world for world, _ in found}
    if len(worlds) > 1:
        raise CheckpointError(
            f"the folder has shards of {len(worlds)} world sizes: {sorted(worlds)}",
            where=str(place),
            fix="keep only the shards of one run in the folder",
        )
    world = worlds.pop()
    said = read_json(place / "fsdp_config.json").get("world_size") if (place / "fsdp_config.json").is_file() else world
    missing = [rank for rank in range(world) if (world, rank) not in found]
    what = f"rank {missing[0]} of {world} has no file" if missing else "" if world else "a file says world size 0"
    if said != world:
        what = f"fsdp_config.json says world_size {said}, but the file names say {world}"
    if what:
        raise CheckpointError(what, where=str(place), fix="copy the whole folder again")
    return tuple(found[world, rank] for rank in range(world))
