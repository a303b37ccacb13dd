"""Merges an adapter into its base, and yields the merged weights by the names of the Hugging Face checkpoint.

LoRA and its relatives (rsLoRA, DoRA, PiSSA, OLoRA) are added in fp32 and rounded once, by the same function that makes the
weights for an engine without adapters. Other methods are merged layer by layer by PEFT's own formula. The model is not changed
or copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.models.merged_weights import merged_of
from lockstep.models.mxfp4 import dense_weights
from lockstep.models.nf4 import Nf4Linear
from lockstep.models.weights import active_adapter, clean_name, named_weights, stored_buffers
from lockstep.sync.merged import merged
from lockstep.types import WeightStream


def merged_weights(model: nn.Module) -> WeightStream:
    """Yield names and tensors of the model with its active adapter merged in; tensors without an adapter are the live ones.

    A model without adapters yields its weights. Raises ModelError for weights that are not finite after merging.
    """
    layers = adapter_layers(model) if active_adapter(model) is not None else {}
    if all(hasattr(layer, "lora_A") for layer in layers.values()):
        yield from _finite(merged(_unpacked(model, layers), dithered=bool(merged_of(model))))
        return
    names = set(base_names(model))
    for name, tensor in named_weights(model):
        layer = layers.get(name.rpartition(".")[0])
        if name not in names:
            continue
        if layer is None:
            yield name, tensor
        else:
            yield from _finite(iter([(name, _merged_by_peft(layer, name.rpartition(".")[2]))]))


def _unpacked(model: nn.Module, layers: dict[str, Any]) -> WeightStream:
    """Yield the stream with the layers stored in 4 bits replaced by the weights that they stand for."""
    packed = {name for name, layer in layers.items() if isinstance(layer.get_base_layer(), Nf4Linear)}
    for name, tensor in dense_weights(model):
        layer, _, part = name.rpartition(".")
        if layer not in packed or part not in ("codes", "scales"):
            yield name, tensor
        elif part == "codes":
            yield f"{layer}.weight", layers[layer].get_base_layer().weight


def base_names(model: nn.Module) -> list[str]:
    """Return the checkpoint's names of the weights without any adapter's, tied ones once."""
    of_adapters = tuple(
        name for _, layer in model.named_modules() for name in getattr(layer, "adapter_layer_names", ())
    )
    return [
        clean_name(name)
        for name, _ in (*model.named_parameters(), *stored_buffers(model))
        if not any(part in of_adapters for part in name.split("."))
    ]


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's layers by the checkpoint's names."""
    return {
        clean_name(name): module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "merge")
    }


@torch.no_grad()
def _merged_by_peft(layer: Any, part: str) -> Tensor:
    with _restored(layer):
        layer.merge(safe_merge=True)
        tensor: Tensor = getattr(layer.get_base_layer(), part).detach().clone()
    return tensor


@contextmanager
def _restored(layer: Any) -> Iterator[None]:
    """Put the same tensors of a layer's base back afterwards: unmerging would subtract, and round."""
    base = layer.get_base_layer()
    kept = {name: parameter.data for name, parameter in base.named_parameters()}
    copies = {name: data.clone() for name, data in kept.items()}
    try:
        yield
    finally:
        for name, parameter in base.named_parameters():
            parameter.data = kept[name].copy_(copies[name])
        layer.merged_adapters.clear()


def _finite(stream: WeightStream) -> WeightStream:
    for name, tensor in stream:
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                "some weights are not finite after the adapter is merged", where=name, fix="use an earlier checkpoint"
            )
        yield name, tensor
