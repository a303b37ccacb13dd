"""Copies a saved adapter into a fresh one of the same kind and shape (`adapter.start`)."""

from __future__ import annotations

from typing import Any

from lockstep.config.adapter import RESIDUAL_INITS, Lora, OtherPeft
from lockstep.errors import ModelError
from lockstep.learner.adapter_files import AdapterFolder, in_own_layout, trained_tensors
from lockstep.learner.adapter_start import START_A, START_B, lora_layers, set_start
from lockstep.models.weights import load_weights

OURS = (
    "target_modules", "exclude_modules", "modules_to_save", "bias", "task_type", "peft_type", "inference_mode",
    "fan_in_fan_out", "revision", "peft_version", "auto_mapping", "base_model_name_or_path",
)  # fmt: skip
"""Options that are settings of ours, would train weights of the base, or have no effect here."""
_HIDDEN = ("alpha_pattern", "layer_replication", "use_qalora")
"""Settings of PEFT's LoRA that neither names nor shapes of its tensors show."""


def take_saved(model: Any, adapter: Lora | OtherPeft, start: AdapterFolder) -> None:
    """Copy a saved adapter into a fresh one. Raises ModelError unless method, layers, shapes and scaling are equal."""
    own = dict(trained_tensors(model))
    residual = adapter.init if isinstance(adapter, Lora) and adapter.init in RESIDUAL_INITS else ""
    if start.residual != residual:
        kind = f"with adapter.init={start.residual}" if start.residual else "without adapter.init=pissa or olora"
        raise ModelError(
            f"the saved adapter was trained {kind}, but this run's adapter is not",
            where=str(start.path),
            fix=f"to continue the saved adapter, set adapter.init={start.residual or 'default'}",
        )
    saved = in_own_layout(start.weights, own)
    saved = {name: tensor for name, tensor in saved.items() if not name.endswith((START_A, START_B))}
    wrong = sorted(
        [name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape]
        or own.keys() ^ saved.keys()
    )
    if wrong:
        name = wrong[0]
        shapes = [str(tuple(side[name].shape)) if name in side else "nothing" for side in (saved, own)]
        raise ModelError(
            f"{len(wrong)} tensors of the saved adapter do not fit the recipe, the first is {name}: {shapes[0]} in the folder, "
            f"{shapes[1]} in the recipe",
            where=str(start.path),
            fix=f"set adapter to the values that it was made with: {_made_with(start)}",
        )
    _check_settings(model, adapter, start)
    if residual:
        for name, layer in lora_layers(model).items():
            weight = layer.get_base_layer().weight
            halves = (start.weights[name + part].to(weight.device, weight.dtype) for part in (START_A, START_B))
            set_start(layer, *halves)
    load_weights(model, ((name, saved[name].to(own[name].dtype)) for name in own))


def _check_settings(model: Any, adapter: Lora | OtherPeft, start: AdapterFolder) -> None:
    """Compare settings that shapes do not show: the scaling of LoRA, the options of the others."""
    config = start.config
    if isinstance(adapter, Lora) and (strange := [name for name in _HIDDEN if config.get(name)]):
        same, told = False, f"settings that a recipe has not: {', '.join(strange)}"
    elif isinstance(adapter, Lora):
        rank = config.get("r", adapter.rank)
        scaling = config.get("lora_alpha", 0) / (rank**0.5 if config.get("use_rslora") else rank)
        same = abs(scaling - adapter.scaling) <= 1e-9 * adapter.scaling
        told = f"scaling {scaling:g}, but the recipe gives {adapter.scaling:g}"
    else:
        ours = model.peft_config["default"].to_dict()
        skip = {*OURS, "base_model_name_or_path", "peft_version", "revision", "auto_mapping", "feedforward_modules"}
        differing = sorted(k for k in config.keys() & ours.keys() - skip if config[k] != ours[k])
        same, told = not differing, f"values of {', '.join(differing)} that differ from the recipe's"
    if not same:
        raise ModelError(
            f"the saved adapter has {told}",
            where=str(start.path),
            fix=f"set adapter to the values that it was made with: {_made_with(start)}",
        )


def _made_with(start: AdapterFolder) -> str:
    shown = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "rank_pattern")
    told = {name: start.config[name] for name in shown if start.config.get(name) not in (None, False)}
    if start.residual:
        told |= {"r": int(told["r"]) // 2, "lora_alpha": float(told["lora_alpha"]) / 2, "init": start.residual}
    return ", ".join(f"{name} {value}" for name, value in told.items())
