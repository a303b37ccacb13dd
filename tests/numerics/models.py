"""Quantised models made the plain way: an own copy whose linear layers are written out, for autograd to differentiate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.numerics.linear import Quantiser
from tests.numerics.test_linear import reference

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("gate_up_proj", "down_proj")
"""Matrices of the experts of a mixture."""


def quantised_reference(
    model: nn.Module, numeric: str, scale: Any = "floor", names: Iterable[str] = LAYERS
) -> nn.Module:
    """A copy of a transformers model whose layers of these names compute on straight-through operands; so do its experts if
    gate_up_proj is among the names, or `names` is not the default and has down_proj.
    """
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
        if type(module).__name__.endswith("Experts") and chosen != LAYERS:
            written: Any = module
            written.forward = quantised_experts(module, quantiser, chosen)
    assert found
    return model


def quantised_experts(
    module: Any, quantiser: Quantiser, names: Iterable[str]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The forward of a module of experts, token by token, with straight-through operands in the products of these names."""
    chosen, paired = tuple(names), hasattr(module, "down_proj_bias")

    def times(x: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(module, name)[expert]
        weight = weight.T if paired else weight
        out = reference(x, weight, None, quantiser) if name in chosen else x @ weight.T
        return out + getattr(module, f"{name}_bias")[expert] if paired else out

    def token(x: Tensor, expert: int) -> Tensor:
        both = times(x[None], "gate_up_proj", expert)
        if paired:
            gate, up = both[:, ::2].clamp(max=module.limit), both[:, 1::2].clamp(-module.limit, module.limit)
            inner = gate * torch.sigmoid(gate * module.alpha) * (up + 1)
        else:
            gate, up = both.chunk(2, -1)
            inner = nn.functional.silu(gate) * up
        return times(inner, "down_proj", expert)[0]

    def forward(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows = [
            torch.stack([w * token(one, e) for e, w in zip(chosen_by.tolist(), weights, strict=True)]).sum(0)
            for one, chosen_by, weights in zip(x, index, weight, strict=True)
        ]
        return torch.stack(rows).to(x.dtype)

    return forward


def largest_difference(one: Iterable[Iterable[float]], other: Iterable[Iterable[float]]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((torch.tensor(tuple(a)) - torch.tensor(tuple(b))).abs().max()) for a, b in pairs)
