"""The weights of a model as a stream of names and tensors, which is sent to an engine, fingerprinted and saved.

Parameters and stored buffers: those that a checkpoint has, such as the correction of a router's scores (DeepSeek-V3,
GLM-4-MoE). Names are those of the Hugging Face checkpoint, whether or not adapters are attached. An adapter adds, per layer,
`<layer>.lora_A`, `<layer>.lora_B` and `<layer>.lora_scaling` (one float64 element), because the right A and B with a wrong
scaling give a wrong model; other methods of PEFT add their parameters under PEFT's names. With several adapters only the active
one is in the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import SyncError
from lockstep.types import WeightStream

_PEFT_PREFIX = "base_model.model."
_WHOLE_MODULES = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Parameters that PEFT keeps in modules of their own, whose `.weight` is left out here."""


def active_adapter(model: nn.Module) -> str | None:
    """Return PEFT's name of the active adapter; None for a model without adapters, or with all of them off."""
    if not hasattr(model, "peft_config"):
        return None
    tuner: Any = getattr(model, "base_model", model)
    layer: Any = next((m for m in tuner.modules() if hasattr(m, "base_layer") and hasattr(m, "disable_adapters")), None)
    if layer is None or layer.disable_adapters:
        return None
    names = layer.active_adapters
    return str(names[0]) if names else None


def named_weights(model: nn.Module, *, trainable_only: bool = False) -> WeightStream:
    """Yield every parameter and stored buffer once (tied weights under their first name), then the adapters' scalings.

    Tensors are the live ones.
    """
    contents = _contents(model)
    for name, tensor in contents.tensors:
        if tensor.requires_grad or not trainable_only:
            yield name, tensor.detach()
    factors = [float(scaling[contents.adapter]) for scaling in contents.scalings.values()]
    for name, factor in zip(contents.scalings, torch.tensor(factors, dtype=torch.float64).split(1), strict=False):
        yield f"{name}.lora_scaling", factor


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Return the names of weights that training never changes."""
    return frozenset(name for name, tensor in _contents(model).tensors if not tensor.requires_grad)


def stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers that belong to a checkpoint, by torch's names. Others, such as frequencies, follow from the config."""
    stored = module.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def load_weights(model: nn.Module, weights: WeightStream) -> list[str]:
    """Copy a stream into a model of the same shape, in place; returns the names taken.

    Raises SyncError for a name that the model lacks, or another shape or dtype.
    """
    taken: list[str] = []
    for name, tensor in weights:
        if not taken:  # a stream may be empty, where the weights are shared
            contents = _contents(model)
            own = dict(contents.tensors)
        scaling = contents.scalings.get(name.removesuffix(".lora_scaling")) if name.endswith(".lora_scaling") else None
        if scaling is not None:
            scaling[contents.adapter] = float(tensor.item())
        elif name not in own:
            raise SyncError(
                "the engine has no tensor of this name",
                where=name,
                fix="give learner and engine the same model and adapter",
            )
        else:
            _copy(name, own[name], tensor)
        taken.append(name)
    return taken


@lru_cache(maxsize=1 << 16)
def clean_name(name: str, adapter: str = "default") -> str:
    """Return the checkpoint's name of a parameter, without what PEFT wraps around it."""
    name = name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")
    for module in _WHOLE_MODULES:
        if name.endswith(f".{module}.{adapter}.weight"):
            return name.removesuffix(f".{adapter}.weight")
    if name.endswith(f".{adapter}"):
        return name.removesuffix(f".{adapter}")
    return name.replace(f".{adapter}.", ".")


@dataclass(frozen=True, slots=True)
class _Contents:
    """Content of a model under the checkpoint's names; of several adapters only the active one."""

    tensors: list[tuple[str, Tensor]]
    """Parameters and stored buffers."""
    scalings: dict[str, dict[str, float]]
    """Scalings of the LoRA layers: a factor for each adapter."""
    adapter: str
    """Name of the active adapter."""


def _contents(model: nn.Module) -> _Contents:
    """Collect it in one walk over the modules. Nothing of it is kept for the next, so that every change of the model is seen."""
    adapters = frozenset[str](getattr(model, "peft_config", ()))
    active = active_adapter(model) if adapters else None
    found = _Contents([], {}, active or "")
    seen, walked = set[int](), set[nn.Module]()
    waiting = [("", model)]
    while waiting:  # in the order of named_modules(), which takes several times as long
        path, module = waiting.pop()
        if module in walked:
            continue
        walked.add(module)
        if children := module._modules:
            waiting += [  # without the empty ones, of which PEFT makes many
                (f"{path}{key}.", child)
                for key, child in reversed(children.items())
                if child is not None and (child._modules or child._parameters or child._buffers)
            ]
            scaling: Any = getattr(module, "scaling", None) if active and "lora_A" in children else None
            if scaling is not None and active in scaling:
                found.scalings[clean_name(path[:-1])] = scaling
        held: dict[str, Any] = module._parameters
        if module._buffers:
            held = held | {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in held.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            owner, name = _named(f"{path}{key}", adapters)
            # A method's own buffers are made again from its seed or the base (VeRA, DeLoRA).
            if owner is None or (owner == active and key in module._parameters):
                found.tensors.append((name, tensor))
    return found


@lru_cache(maxsize=1 << 16)
def _named(name: str, adapters: frozenset[str]) -> tuple[str | None, str]:
    """Return the adapter that a tensor belongs to, None for the model's own, and the checkpoint's name of it."""
    owner = next((part for part in name.split(".") if part in adapters), None) if adapters else None
    return owner, clean_name(name, owner or "default") if adapters else name


def _copy(name: str, own: Tensor, tensor: Tensor) -> None:
    if own.shape != tensor.shape or own.dtype != tensor.dtype:
        raise SyncError(
            f"the tensor that was sent is {tuple(tensor.shape)} {tensor.dtype}, the engine's is {tuple(own.shape)} {own.dtype}",
            where=name,
            fix="give learner and engine the same model and adapter",
        )
    with torch.no_grad():
        own.copy_(tensor)
