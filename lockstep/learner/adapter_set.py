"""Several saved adapters over one base in memory, one active at a time: evaluated one after the other, or swapped per task.

    adapters = AdapterSet(model, Base.of(model, name))
    adapters.attach("sums", Path("runs/sums/checkpoints/step_000100"))
    adapters.attach("chess", Path("chess-adapter"))
    adapters.activate("sums")         # None: the base

After activate() an engine over `adapters.model` must be given a new version (engine.load(iter(()), version)), which drops its
results from the previous weights; the proof of sync then shows the active adapter's fingerprint.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.learner.adapter_files import (
    AdapterFolder,
    Base,
    check_base,
    file_name,
    in_own_layout,
    layers_of,
    read_adapter,
)
from lockstep.learner.adapter_start import START_A, START_B
from lockstep.learner.lora_experts import attach_to_experts, in_experts, rank_on_experts, scaling_on_experts
from lockstep.models.weights import load_weights, named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = re.compile(r"[A-Za-z0-9][\w-]*")


class AdapterSet:
    """Adapters by name over one base, all frozen."""

    def __init__(self, model: PreTrainedModel, base: Base) -> None:
        """Take `model`, which has no adapters yet, and its `base`. The model is changed in place: its layers become PEFT's."""
        self.model: nn.Module = model
        self.active: str | None = None
        self._base, self._names = base, [name for name, _ in named_weights(model)]
        self._attached: dict[str, AdapterFolder] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order in which the adapters were attached."""
        return tuple(self._attached)

    def attach(self, name: str, folder: Path) -> str:
        """Read an adapter in PEFT's layout; the active one stays active. Returns a warning, or "".

        Raises ModelError if the name is taken, the adapter has another base or method, or it does not fit.
        """
        if not NAME.fullmatch(name) or name in self._attached:
            raise ModelError(
                f"the adapter name {name!r} is in use, or not valid",
                where=str(folder),
                fix="choose an unused name of letters, digits, - and _",
            )
        found = read_adapter(folder)
        warning = check_base(found, self._base)
        self._add(_inner(name), found)
        self._switch(_inner(name))
        try:
            self._fill(found)
        finally:
            self._switch(None if self.active is None else _inner(self.active))
        self._attached[name] = found
        return warning

    def activate(self, name: str | None) -> None:
        """Turn this adapter on and all others off; None turns all off. Raises ModelError for an unknown name."""
        if name is not None and name not in self._attached:
            raise ModelError(
                f"no adapter is called {name!r}", fix=f"attach it first; attached: {', '.join(self.names) or 'none'}"
            )
        self._switch(None if name is None else _inner(name))
        self.active = name

    def _add(self, name: str, found: AdapterFolder) -> None:
        from peft import get_peft_model

        config = _config(found)
        model: Any = self.model
        experts = [name for name in found.weights if in_experts(name)]
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # derived from names that are about to change, and from several adapters
            try:
                if hasattr(model, "peft_config"):
                    model.add_adapter(name, config, autocast_adapter_dtype=False)
                else:
                    self.model = get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=False).eval()
            except ValueError as error:
                raise ModelError(
                    f"the adapter cannot be attached beside the others: {error}",
                    where=str(found.path),
                    fix="load this adapter over a separate copy of the base",
                ) from error
            if experts:
                attach_to_experts(self.model, name, rank_on_experts(found.config), scaling_on_experts(found.config))
        self.model.requires_grad_(False)

    def _switch(self, name: str | None) -> None:
        model: Any = self.model
        if not hasattr(model, "peft_config"):
            return
        if name is None:
            model.base_model.disable_adapter_layers()
            return
        model.base_model.enable_adapter_layers()
        model.set_adapter(name)
        model.requires_grad_(False)

    def _fill(self, found: AdapterFolder) -> None:
        """Copy the saved tensors into the active adapter. Raises ModelError for missing, unknown or misshapen tensors."""
        base = set(self._names)
        own = {n: t for n, t in named_weights(self.model) if n not in base and not n.endswith(".lora_scaling")}
        saved = in_own_layout(_over_the_original(found), own)
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        wrong = sorted(
            name for name in own.keys() | saved.keys() if name not in own or shapes.get(name) != tuple(own[name].shape)
        )
        if wrong:
            raise ModelError(
                f"{len(wrong)} tensors do not fit the model, the first is {wrong[0]}",
                where=str(found.path),
                fix="give an adapter that was trained on this model",
            )
        load_weights(self.model, ((name, tensor.to(own[name].dtype)) for name, tensor in saved.items()))


def _inner(name: str) -> str:
    """Return PEFT's name of an adapter, made so that no module of a model has it."""
    return f"@{name}"


def _config(found: AdapterFolder) -> Any:
    from peft import LoraConfig, PeftConfig

    from lockstep.learner.lora_linear import LoraLinear

    config: Any = PeftConfig.from_pretrained(str(found.path))
    config.inference_mode = True
    config.target_modules = layers_of(file_name(name) for name in found.weights)
    config.target_parameters = None  # those of experts are attached by us
    for name in ("exclude_modules", "layers_to_transform", "layers_pattern"):  # the tensors say which layers
        if getattr(config, name, None):
            setattr(config, name, None)
    if isinstance(config, LoraConfig):
        config.init_lora_weights = True
        config._register_custom_module({torch.nn.Linear: LoraLinear})
    return config


def _over_the_original(found: AdapterFolder) -> dict[str, torch.Tensor]:
    """Return the tensors as the files have them: with a separate start, B·A - B₀·A₀ joined in one pair again."""
    saved = dict(found.weights)
    for name in [name for name in saved if name.endswith(START_A)]:
        layer = name.removesuffix(START_A)
        saved[f"{layer}.lora_A"] = torch.cat([saved[f"{layer}.lora_A"], saved.pop(layer + START_A)])
        saved[f"{layer}.lora_B"] = torch.cat([saved[f"{layer}.lora_B"], -saved.pop(layer + START_B)], 1)
    return saved
