"""AdamW with moments of one byte each, and a scale for each block (Dettmers et al., 8-bit optimizers, arXiv 2110.02861).

A block of 256 numbers is divided by its largest; each becomes the nearest of 256 levels, which cover seven decades, with more
levels in the decades nearer to 1. The second moment is stored as its square root, which has half the range of exponents: so a
small moment does not become 0, which would make its step enormous. Weights and gradients are not quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256
CHUNK = 2**25
"""Number of weights that are updated together: their moments are unpacked for that time. A multiple of BLOCK."""
DECADES = 7


def levels(signed: bool) -> Tensor:
    """Return the 256 numbers that a code can stand for, ascending, in [-1, 1] or [0, 1]; fp64."""
    numbers = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        middles = [10.0 ** (decade + 1 - DECADES) * (0.1 + width * (i + 0.5)) for i in range(count)]
        numbers += [*middles, *(-m for m in middles if signed)]
    return torch.tensor(sorted(numbers), dtype=torch.float64)


def encode(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes (uint8, shaped as `values`) and one scale per block. If not signed, only 0 is coded as 0."""
    flat = values.reshape(-1)
    blocks = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    _, borders = _tables(signed, values.dtype, values.device)
    codes = torch.bucketize(blocks / scales.where(scales > 0, 1.0)[:, None], borders, out_int32=True)
    return codes.to(torch.uint8).view(-1)[: flat.numel()].view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the approximate numbers that `encode` stored, in the scales' precision."""
    table, _ = _tables(signed, scales.dtype, scales.device)
    flat = table[codes.reshape(-1).int()]
    blocks = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return blocks.view(-1)[: flat.numel()].view(codes.shape)


@cache
def _tables(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the levels, and the borders between neighbouring ones."""
    table = levels(signed)
    borders = (table[1:] + table[:-1]) / 2
    if not signed:
        borders[0] = 0.0
    return table.to(device, dtype), borders.to(device, dtype)


class AdamW8bit:
    """The part of torch.optim.AdamW that MasterOptimizer needs: groups, state, step, zero_grad. Weights must be contiguous."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        self.param_groups = [dict(group) for group in groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        """State per parameter: step, on the CPU; exp_avg and exp_avg_sq, codes of the first moment and of the second's root;
        their NAME_scale.
        """
        self._betas, self._eps = betas, eps

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.setdefault(parameter, _empty_state(parameter))
                state["step"] += 1
                for weights, grad, piece in _chunks(parameter, state):
                    self._update(weights, grad, piece, float(state["step"]), group["lr"], group["weight_decay"])

    def _update(
        self, weights: Tensor, grad: Tensor, state: dict[str, Tensor], step: float, lr: float, weight_decay: float
    ) -> None:
        """Update part of a weight as torch.optim.AdamW does."""
        first, second = self._betas
        mean = decode(state["exp_avg"], state["exp_avg_scale"], signed=True).lerp_(grad, 1 - first)
        square = decode(state["exp_avg_sq"], state["exp_avg_sq_scale"], signed=False).square_()
        root = square.mul_(second).addcmul_(grad, grad, value=1 - second).sqrt_()
        for name, values, signed in (("exp_avg", mean, True), ("exp_avg_sq", root, False)):
            codes, scales = encode(values, signed=signed)
            state[name].copy_(codes)
            state[f"{name}_scale"].copy_(scales)
        weights.mul_(1 - lr * weight_decay)
        denominator = (root / (1 - second**step) ** 0.5).add_(self._eps)
        weights.addcdiv_(mean, denominator, value=-lr / (1 - first**step))


def scale_count(parameter: Tensor) -> int:
    """Return the number of blocks of a weight."""
    return -(-parameter.numel() // BLOCK)


def _empty_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state before the first step. Level 0 of the second moment is 0; the first has 0 in the middle, and a scale of
    0 makes all of it 0.
    """
    state = {"step": torch.zeros(())}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        state[f"{name}_scale"] = parameter.new_zeros(scale_count(parameter))
    return state


def _chunks(parameter: nn.Parameter, state: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Yield views of the weights, their gradients and their state, CHUNK weights at a time."""
    if parameter.grad is None:
        return
    weights, grad = parameter.view(-1), parameter.grad.reshape(-1)
    for start in range(0, weights.numel(), CHUNK):
        span, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
        piece = {
            name: value[blocks] if name.endswith("_scale") else value.view(-1)[span]
            for name, value in state.items()
            if name != "step"
        }
        yield weights[span], grad[span], piece
