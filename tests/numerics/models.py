"""Quantised models made the plain way: an own copy whose linear layers are written out, for autograd to differentiate."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.numerics.linear import Quantiser
from tests.numerics.test_linear import reference

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantised_reference(
    model: nn.Module, numeric: str, scale: Any = "floor", names: Iterable[str] = LAYERS
) -> nn.Module:
    """A copy of a transformers model whose layers of these names compute on straight-through operands."""
    model, chosen = copy.deepcopy(model), tuple(names)
    quantiser = Quantiser(numeric, scale)

    def forward(self: Any, x: Tensor) -> Tensor:
        return reference(x, self.weight, self.bias, quantiser)

    found = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in chosen:
            replaced: Any = module
            replaced.forward = MethodType(forward, module)
            found += 1
    assert found
    return model


def largest_difference(one: Iterable[Iterable[float]], other: Iterable[Iterable[float]]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((torch.tensor(tuple(a)) - torch.tensor(tuple(b))).abs().max()) for a, b in pairs)
