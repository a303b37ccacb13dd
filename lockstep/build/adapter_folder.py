"""Recognises adapters in PEFT's layout and sharded training folders among folders of weights. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config.adapter import REGEX, Adapter, Lora, OtherPeft
from lockstep.errors import CheckpointError, ModelError
from lockstep.models.folder import ADAPTER_CONFIG, ADAPTER_TENSORS, read_json

NESTED = ("lora_adapter", "actor/lora_adapter", "adapter")
"""Folders in which trainers put an adapter inside a step's folder (verl: global_step_29/actor/lora_adapter)."""
SHARDS = {
    "model_world_size_*_rank_*.pt": ("FSDP shards of verl", True),
    "*.distcp": ("a torch.distributed checkpoint", False),
    "pytorch_model_fsdp*": ("FSDP shards of accelerate", False),
    "mp_rank_*": ("Megatron shards, or model states of DeepSpeed", True),
    "*zero_pp_rank_*": ("DeepSpeed ZeRO shards", True),
}
"""File names of sharded training folders, the program that writes them, and True if `lockstep import` reads some of them."""
_UNREAD = (
    "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "layer_replication", "fan_in_fan_out",
    "lora_bias", "target_parameters", "exclude_modules", "trainable_token_indices", "use_qalora", "megatron_config",
)  # fmt: skip
"""Settings of PEFT's LoRA that change the result of an adapter and that the recipe's adapter does not have."""


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """An adapter in PEFT's layout. Example: AdapterTarget(Path("out/lora"), "Qwen/Qwen3-4B", {…})"""

    path: Path
    base: str
    """Name of the model that it says it was made for; "" if it does not say."""
    config: Mapping[str, Any]


def find_adapter(path: Path) -> AdapterTarget | None:
    """Return the adapter in a folder, or in a subfolder where trainers put it; None if there is none."""
    for place in (path, *(path / name for name in NESTED)):
        if (place / ADAPTER_CONFIG).is_file():
            config = read_json(place / ADAPTER_CONFIG)
            return AdapterTarget(place, str(config.get("base_model_name_or_path") or ""), config)
    return None


def refuse_sharded(path: Path) -> None:
    """Raise CheckpointError for a folder of training shards: nothing here reads them."""
    for place in (path, path / "actor", path / "model", *sorted(path.glob("global_step*"))[-1:]):
        for pattern, (whose, imported) in SHARDS.items():
            if files := sorted(place.glob(pattern)):
                raise CheckpointError(
                    f"the folder holds training shards ({whose}: {len(files)} files such as {files[0].name}), which are not read",
                    where=str(path),
                    fix=f"convert it with lockstep import {path} OUT, and give OUT"
                    if imported
                    else "gather it into a Hugging Face folder with the program that wrote it, and give that folder",
                )


def adapter_settings(found: AdapterTarget, asked: Adapter) -> Adapter:
    """Return the recipe's settings for a saved adapter. `asked`, the recipe's own, names PEFT's methods besides LoRA.

    Raises ModelError, with the reason, for an adapter that they cannot describe.
    """
    from lockstep.learner.lora_experts import has_adapted_experts, rank_on_experts

    config, method = found.config, str(found.config.get("peft_type", "LORA")).lower()
    if method != "lora":
        if isinstance(asked, OtherPeft) and asked.method == method:
            return asked
        raise _unread(found, f"its method is {method}", f"adapter={{kind: peft, method: {method}, options: {{…}}}}")
    on_experts = has_adapted_experts(config)
    known = ("target_parameters", "rank_pattern") if on_experts else ()
    if strange := [name for name in _UNREAD if config.get(name) and name not in known]:
        raise _unread(found, f"it uses {', '.join(strange)}")
    if config.get("bias", "none") != "none":
        raise _unread(found, f"it trains biases (bias: {config['bias']})")
    targets = config.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        raise _unread(found, "it names no target_modules")
    if isinstance(targets, str) or any(str(target).startswith(REGEX) for target in targets):
        targets = _layers(found.path)  # a foreign expression is not evaluated: it may never end
    settings = {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "targets": sorted(map(str, targets))}
    if on_experts:
        settings["expert_rank"] = rank_on_experts(config)
    switches = {name: bool(config.get(f"use_{name}")) for name in ("rslora", "dora")}
    try:
        return Lora.model_validate(settings | switches)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of settings that exclude each other
            raise _unread(found, first["msg"]) from error
        where = {"rank": "r", "alpha": "lora_alpha"}.get(str(first["loc"][0]), str(first["loc"][0]))
        raise _unread(found, f"{where} is {str(first['input'])[:40]}: {first['msg']}") from error


def _layers(folder: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    from lockstep.learner.adapter_files import layers_of

    try:
        with safe_open(folder / ADAPTER_TENSORS, framework="pt") as file:
            return layers_of(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{ADAPTER_TENSORS} cannot be read: {error}", where=str(folder), fix="copy the folder again"
        ) from error


def _unread(found: AdapterTarget, why: str, setting: str = "") -> ModelError:
    fix = f"give its method with --set {setting}, or " if setting else ""
    return ModelError(
        f"the adapter cannot be rebuilt from its settings: {why}",
        where=str(found.path),
        fix=f"{fix}merge it into its base with the program that made it, and give the merged folder",
    )
