"""Measures the effect of bf16 rounding on a model's log-probabilities: a lower bound for the difference of two engines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.learner.learner import base_model, plain_logprobs
from lockstep.types import TokenIds

RELATIVE = 2.0**-9
"""Half of bf16's last digit. SmolLM2-135M on random tokens: such noise moves its log-probabilities by 0.073 on average, and
bf16 is 0.065 away from fp32.
"""


@contextmanager
def shaken(model: nn.Module, *, attention: bool = False) -> Iterator[None]:
    """Add relative noise, always the same, to the output of each layer, or of each layer's attention alone, inside the
    block.
    """
    decoder: Any = base_model(model).get_decoder()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1)

    def shake(_: Any, inputs: Any, output: Any) -> Any:
        first: Tensor = output[0] if isinstance(output, tuple) else output
        noise = torch.randn(first.shape, generator=generator, device=device)
        moved = (first.float() * (1 + RELATIVE * noise)).to(first.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    parts = [layer.self_attn if attention else layer for layer in decoder.layers]
    handles = [part.register_forward_hook(shake) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rounding_gap(model: nn.Module, sequences: Sequence[TokenIds], tokens_per_microbatch: int) -> float:
    """Return mean |Δ log-probability|, nats, between the model with and without such noise."""
    plain = plain_logprobs(model, sequences, tokens_per_microbatch)
    with shaken(model):
        moved = plain_logprobs(model, sequences, tokens_per_microbatch)
    gaps = [abs(a - b) for one, other in zip(plain, moved, strict=True) for a, b in zip(one, other, strict=True)]
    return math.fsum(gaps) / len(gaps)
