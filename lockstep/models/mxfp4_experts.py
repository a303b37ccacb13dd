"""The experts of gpt-oss with frozen matrices that stay in MXFP4 in memory, at 4.5 bits a weight.

A matrix is dequantised when it is used. E2M1 times a power of two is exact in bf16 and fp32, so the results are those of dense
experts.

Legend: T tokens, K experts of each, R rows of one expert, H hidden, X inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.mxfp4 import BLOCKS, SCALES, Packed


class Mxfp4Experts(nn.Module):
    """Takes the place of transformers' GptOssExperts. Blocks and scales are parameters, so that fingerprints cover them."""

    def __init__(self, dense: Any, gate_up: Packed, down: Packed) -> None:
        """`dense`: the module to replace. Its biases are kept, its matrices are not read."""
        super().__init__()
        self.num_experts, self.alpha, self.limit = dense.num_experts, dense.alpha, dense.limit
        self._gated = type(dense)._apply_gate
        self.gate_up_proj_bias, self.down_proj_bias = dense.gate_up_proj_bias, dense.down_proj_bias
        for name, packed in (("gate_up_proj", gate_up), ("down_proj", down)):
            self.register_parameter(name + BLOCKS, nn.Parameter(packed.words, requires_grad=False))
            self.register_parameter(name + SCALES, nn.Parameter(packed.powers, requires_grad=False))

    def _apply_gate(self, both_RO: Tensor) -> Tensor:
        inner_RX: Tensor = self._gated(self, both_RO)
        return inner_RX

    @property
    def gate_up(self) -> Packed:
        return Packed(self.gate_up_proj_blocks, self.gate_up_proj_scales)  # type: ignore[arg-type]

    @property
    def down(self) -> Packed:
        return Packed(self.down_proj_blocks, self.down_proj_scales)  # type: ignore[arg-type]

    def forward(
        self, hidden_states: Tensor, router_indices: Tensor | None = None, routing_weights: Tensor | None = None
    ) -> Tensor:
        """Return each token's weighted sum over its experts, [T, H], from indices and weights [T, K]."""
        assert router_indices is not None
        assert routing_weights is not None
        out_TH = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            k_R, token_R = torch.where(expert == router_indices.T)
            both = times(hidden_states[token_R], self.gate_up, expert) + self.gate_up_proj_bias[expert]
            out_RH = times(self._apply_gate(both), self.down, expert) + self.down_proj_bias[expert]
            weighted_RH = out_RH * routing_weights[token_R, k_R, None]
            out_TH = out_TH.index_add(0, token_R, weighted_RH.to(hidden_states.dtype))
        return out_TH


def times(x_RX: Tensor, packed: Packed, expert: int) -> Tensor:
    """Multiply rows by the matrix of an expert."""
    function: Any = _Product
    result: Tensor = function.apply(x_RX, packed, expert)
    return result


class _Product(torch.autograd.Function):
    """Rows times the matrix of an expert. It is dequantised again for the backward pass, and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, packed: Packed, expert: int) -> Tensor:
        ctx.packed, ctx.expert = packed, expert
        return x_RX @ packed.matrix(expert, x_RX.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.packed.matrix(ctx.expert, grads[0].dtype).T, None, None
