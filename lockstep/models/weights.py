"""The weights of a model as a stream of names and tensors: what is sent to an engine, fingerprinted and saved.

Names are those of the Hugging Face checkpoint, whether or not adapters are attached. An adapter adds, per layer,
`<layer>.lora_A`, `<layer>.lora_B` and `<layer>.lora_scaling` (one float64 element), because a right A and B under a wrong
scaling is a wrong model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import SyncError
from lockstep.types import WeightStream

_PEFT_PREFIX = "base_model.model."


def named_weights(model: nn.Module, *, trainable_only: bool = False) -> WeightStream:
    """Every parameter once (tied weights under their first name), then the adapters' scalings. Tensors are the live ones."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trainable_only:
            yield clean_name(name), parameter.detach()
    for name, layer in _lora_layers(model):
        yield f"{name}.lora_scaling", torch.tensor([float(layer.scaling["default"])], dtype=torch.float64)


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of weights that training never changes."""
    return frozenset(clean_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad)


def load_weights(model: nn.Module, weights: WeightStream) -> list[str]:
    """Copy a stream into a model of the same shape, in place; returns the names taken.

    Raises SyncError for a name that the model lacks, or another shape or dtype.
    """
    own = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    layers = dict(_lora_layers(model))
    taken = []
    for name, tensor in weights:
        layer = layers.get(name.removesuffix(".lora_scaling")) if name.endswith(".lora_scaling") else None
        if layer is not None:
            layer.scaling["default"] = float(tensor.item())
        elif name not in own:
            raise SyncError(
                "the engine has no such tensor", where=name, fix="give both sides the same model and adapter"
            )
        else:
            _copy(name, own[name], tensor)
        taken.append(name)
    return taken


def clean_name(name: str) -> str:
    """The checkpoint's name of a parameter, without what PEFT wraps around it."""
    name = name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")
    return name.replace(".lora_A.default.weight", ".lora_A").replace(".lora_B.default.weight", ".lora_B")


def _copy(name: str, own: Tensor, tensor: Tensor) -> None:
    if own.shape != tensor.shape or own.dtype != tensor.dtype:
        raise SyncError(
            f"got {tuple(tensor.shape)} {tensor.dtype}, the engine holds {tuple(own.shape)} {own.dtype}", where=name
        )
    with torch.no_grad():
        own.copy_(tensor)


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            yield clean_name(name), module
