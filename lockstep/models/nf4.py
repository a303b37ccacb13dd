"""Frozen linear layers with 4-bit weights: NF4 of QLoRA (Dettmers et al. 2023, arXiv 2305.14314, appendix E), in plain torch.

Each 64 consecutive weights share a scale, their largest magnitude in bf16; a weight is the nearest of 16 values, which are
quantiles of a normal distribution: 4.25 bits a weight. Before each matrix multiplication the weights are dequantised to the
input's precision, in the forward pass and again in the backward pass, so that only 4-bit weights stay in memory. Works on a CPU
and a GPU without further packages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64
# fmt: off
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


class Nf4Linear(nn.Module):
    """A frozen linear layer; `codes` and `scales` are parameters, so that proofs of sync and fingerprints cover them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        codes, scales = pack(linear.weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Unpacked weight [O, I], in the precision of the original layer."""
        return unpack(self.codes, self.scales, (self.out_features, self.in_features), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        function: Any = _Product
        result: Tensor = function.apply(x, self)
        return result


class _Product(torch.autograd.Function):
    """x · Wᵀ + b, keeping neither x nor W for the backward pass: W is unpacked again and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.weight.to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.weight.to(grad.dtype), None


@torch.no_grad()
def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, two to a byte (the first in the high half), and bf16 scales, of a tensor in row-major order."""
    flat_T = weight.float().reshape(-1)
    blocks_BK = nn.functional.pad(flat_T, (0, -flat_T.numel() % BLOCK)).view(-1, BLOCK)
    scales_B = blocks_BK.abs().amax(1).to(torch.bfloat16)
    wide_B1 = scales_B.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    levels_L = torch.tensor(LEVELS, device=weight.device)
    middles_M = (levels_L[1:] + levels_L[:-1]) / 2
    codes_BK = torch.bucketize(blocks_BK / wide_B1, middles_M).to(torch.uint8)
    return (codes_BK[:, ::2] << 4 | codes_BK[:, 1::2]).contiguous(), scales_B


@torch.no_grad()
def unpack(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weights that codes and scales stand for, rounded to `dtype`."""
    levels_L = torch.tensor(LEVELS, device=codes.device)
    halves_BK2 = torch.stack([codes >> 4, codes & 15], -1).int()
    values_BK = levels_L[halves_BK2].view(len(codes), BLOCK) * scales.float()[:, None]
    return values_BK.view(-1)[: shape[0] * shape[1]].view(shape).to(dtype)
