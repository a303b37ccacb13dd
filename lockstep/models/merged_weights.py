"""The weight of a layer with its adapter merged in, which the learner and the native engine both compute with (adapter.merged).

It is W + scaling · B·A in fp32, rounded once to W's precision, in memory of its own. It is made again from the frozen W when A or
B change, so that roundings never add up. Changes by an adapter are often far below a unit in the last place of a bf16 weight; the
rounding keeps them on average (low_rank.dither_into).

Legend: O outputs, X inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.models.low_rank import Merge, merge_all
from lockstep.models.one_input import adjacent

ADAPTER = "default"


class MergedWeight:
    """The merged weight of one of PEFT's LoRA layers. `tensor` stays in its place, so that captured graphs may read it."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._rounded_to = layer, layer.base_layer.weight.dtype
        self.tensor: Tensor = torch.empty_like(layer.base_layer.weight, memory_format=torch.contiguous_format)
        self._made_of: tuple[object, ...] = ()

    def weight(self) -> Tensor:
        """Return it for the present W, A and B, [O, X]."""
        make([self])
        return self.tensor

    def change(self) -> Change | None:
        """Return the sum to be made; None if W, A and B are those that the present one was made of."""
        parts = self._layer._modules  # looked up directly: this is done for each layer of each pass
        down, up = (parts[name]._modules[ADAPTER]._parameters["weight"] for name in ("lora_A", "lora_B"))
        base, scaling = parts["base_layer"]._parameters["weight"], self._layer.scaling[ADAPTER]
        made_of = (scaling, *((part.data_ptr(), part._version) for part in (base, down, up)))
        if made_of == self._made_of:
            return None
        if (self.tensor.dtype, self.tensor.device) != (base.dtype, base.device):  # the model was widened, or moved
            self.tensor = torch.empty_like(base, memory_format=torch.contiguous_format)
        given = base.detach().to(self._rounded_to)
        out_OX = self.tensor if base.dtype == self._rounded_to else torch.empty_like(given)
        return Change(self, Merge(given, down.detach(), up.detach(), out_OX, scaling), made_of)

    def take(self, change: Change) -> None:
        """Note that a sum is made. A wider weight has its numbers."""
        if change.merge.out_OX is not self.tensor:
            self.tensor.copy_(change.merge.out_OX)
        self._made_of = change.made_of

    def forget(self) -> None:
        """Make it again before it is read next. Call it after writes that torch does not count, as those of fused optimizers."""
        self._made_of = ()


class Change(NamedTuple):
    """A merged weight that must be made again."""

    weight: MergedWeight
    merge: Merge
    made_of: tuple[object, ...]


def make(weights: Sequence[MergedWeight]) -> None:
    """Make those again whose W, A or B has changed."""
    changes = [change for one in weights if (change := one.change()) is not None]
    merge_all([change.merge for change in changes])
    for change in changes:
        change.weight.take(change)


def merged_of(model: nn.Module) -> list[MergedWeight]:
    """Return the merged weights of a model's layers."""
    found = (module.__dict__.get("merged_weight") for module in model.modules())
    return [one for one in found if isinstance(one, MergedWeight)]


def separate(model: nn.Module) -> None:
    """Let the layers compute with their adapters' own products again."""
    for module in model.modules():
        module.__dict__.pop("merged_weight", None)


def joined_merged(parts: Sequence[MergedWeight]) -> Tensor:
    """Return the merged weights of layers with one input as one tensor, of which they become parts."""
    tensors = [part.weight() for part in parts]
    whole = adjacent(tensors)
    if whole is None:
        whole = torch.cat(tensors)
        for part, tensor in zip(parts, whole.split([len(one) for one in tensors]), strict=True):
            part.tensor = tensor
    return whole
