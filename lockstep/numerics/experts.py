"""Runs the experts of a mixture on quantised operands, or with adapters: each expert's matrix is quantised like that of a linear
layer.

On a GPU they are computed by the kernels of models.experts, else in a loop over the experts, as transformers does. Adapters see
the unquantised rows.

Legend: T tokens, K experts of each, R rows of one expert, E experts, H hidden, O outputs, X inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.known import kind_of_experts
from lockstep.models.low_rank import LowRank, adapters_of
from lockstep.models.mxfp4_experts import times
from lockstep.numerics.linear import Quantiser, quantised_linear

MATRICES = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of a layer's experts that are one parameter."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> Tensor:
        weight: Tensor = getattr(self.module, self.name)
        return weight

    @property
    def weight_EOX(self) -> Tensor:
        """The matrices with their inputs last, along which blocks lie."""
        return self.weight.transpose(1, 2) if kind_of_experts(self.module) == "paired" else self.weight


def find_stacks(base: Any) -> tuple[dict[str, Stack], tuple[str, ...]]:
    """Return a model's stacks by their name in the checkpoint, and the names of stacked weights of an unknown form, or kept in
    MXFP4.
    """
    stacks: dict[str, Stack] = {}
    unknown: list[str] = []
    inside = {id(module) for module in base.get_decoder().modules()}
    for name, module in base.named_modules():
        if id(module) not in inside or isinstance(module, nn.Conv1d):
            continue
        match kind_of_experts(module):
            case "gated" | "paired":
                stacks |= {f"{name}.{part}": Stack(module, part) for part in MATRICES}
            case "packed":
                unknown += [f"{name}.{part}" for part in MATRICES]
            case None:
                own = module.named_parameters(recurse=False)
                unknown += [f"{name}.{part}" for part, parameter in own if parameter.dim() == 3]
    return stacks, tuple(n for n in unknown if "lora_" not in n)


def mix_by_kernels(module: Any, quantiser: Quantiser, used: tuple[Tensor | None, ...], *given: Tensor) -> Tensor:
    """Compute `mix` by the kernels of models.experts."""
    from lockstep.models.experts import Experts, Operands  # needs Triton

    experts = Experts.of(module)
    assert experts is not None
    steps = {} if quantiser.spec.activations is None else {"activation": quantiser.activation}
    both = [None if matrices is None else Operands(matrices, **steps) for matrices in used]
    return replace(experts, used=(both[0], both[1]))(*given)


def mix(
    module: Any,
    quantiser: Quantiser | None,
    used: tuple[Tensor | None, ...],
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
) -> Tensor:
    """Return each token's weighted sum over its experts, [T, H], with straight-through gradients.

    `used`: the quantised matrices [E, O, X] of gate and up, and of down; None for those that are left alone.
    """
    gated = kind_of_experts(module) == "gated"
    first, second = (
        _product(module, *given, quantiser) for given in zip(MATRICES, used, adapters_of(module), strict=True)
    )
    out_TH = torch.zeros_like(x_TH)
    for expert in index_TK.unique().tolist():
        k_R, token_R = torch.where(expert == index_TK.T)
        both_RO = first(x_TH[token_R], expert)
        if gated:
            gate, up = both_RO.chunk(2, -1)
            inner_RX = module.act_fn(gate) * up
        else:
            inner_RX = module._apply_gate(both_RO)
        weighted_RH = second(inner_RX, expert) * weight_TK[token_R, k_R, None]
        out_TH = out_TH.index_add(0, token_R, weighted_RH.to(x_TH.dtype))
    return out_TH


def _product(
    module: Any, name: str, used_EOX: Tensor | None, adapter: LowRank | None, quantiser: Quantiser | None
) -> Callable[[Tensor, int], Tensor]:
    bias_EO = getattr(module, f"{name}_bias", None)

    def plain(x_RX: Tensor, expert: int) -> Tensor:
        if kind_of_experts(module) == "packed":
            return times(x_RX, module.gate_up if name == MATRICES[0] else module.down, expert)
        matrix_OX = Stack(module, name).weight_EOX[expert]
        if used_EOX is None or quantiser is None:
            return nn.functional.linear(x_RX, matrix_OX)
        return quantised_linear(x_RX, matrix_OX, None, quantiser, used_weight=used_EOX[expert])

    def product(x_RX: Tensor, expert: int) -> Tensor:
        out_RO = plain(x_RX, expert)
        if adapter is not None:
            out_RO = out_RO + adapter.added(x_RX, expert)
        return out_RO if bias_EO is None else out_RO + bias_EO[expert]

    return product
