"""Measurements that an export is compared with: log-probabilities of the trained model and its base on random sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.export.verify import Difference, Logprobs, difference
from lockstep.learner.learner import base_model, plain_logprobs
from lockstep.learner.merge import adapter_layers
from lockstep.models.low_rank import ADAPTERS

SEQUENCES, TOKENS, SEED = 4, 48, 20260
TEXT = "The answer is \\boxed{42}, because 6 * 7 = 42.\n"
BUDGET = 4096


def probe_sequences(model: nn.Module, special: list[int]) -> tuple[tuple[int, ...], ...]:
    """Draw ids of the model's whole vocabulary, special ones left out; always the same."""
    vocab = int(base_model(model).config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(SEED)
    allowed = torch.tensor(sorted(set(range(vocab)) - set(special)))
    drawn = torch.randint(len(allowed), (SEQUENCES, TOKENS), generator=generator)
    return tuple(tuple(row.tolist()) for row in allowed[drawn])


def wide_logprobs(model: nn.Module, sequences: tuple[tuple[int, ...], ...]) -> Logprobs:
    """Compute log-probabilities by training's forward pass in fp32; widening the model changes none of its numbers."""
    return plain_logprobs(model.float(), sequences, BUDGET)


def rounding_noise(model: nn.Module, sequences: tuple[tuple[int, ...], ...]) -> Difference:
    """Measure how far the log-probabilities of a wide model with an adapter move when its adapted weights are rounded to bf16.

    The errors are random, not those of a merge, so that a wrong merge cannot hide in them.
    """
    before = plain_logprobs(model, sequences, BUDGET)
    with _jittered(_adapted_parameters(model)):
        after = plain_logprobs(model, sequences, BUDGET)
    return difference(after, before)


def _adapted_parameters(model: nn.Module) -> list[nn.Parameter]:
    layers: list[Any] = [layer.get_base_layer() for layer in adapter_layers(model).values()]
    found = [next(p for p in layer.parameters() if p.is_floating_point()) for layer in layers]
    experts = [module for module in model.modules() if ADAPTERS.keys() & module._parameters.keys()]
    return found + [p for e in experts for n, p in e.named_parameters() if ADAPTERS.get(n) in e._modules]


@contextmanager
def _jittered(parameters: list[nn.Parameter]) -> Iterator[None]:
    kept: list[tuple[nn.Parameter, Tensor]] = []
    generator = torch.Generator().manual_seed(SEED)
    try:
        for parameter in parameters:
            kept.append((parameter, parameter.data))
            off = torch.rand(parameter.shape, generator=generator).sub_(0.5).to(parameter.device)
            parameter.data = parameter.data + spacing(parameter.data) * off
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def spacing(weights: Tensor) -> Tensor:
    """Return the distance of the bf16 numbers around each weight: 2^(e-8) for |w| = m·2^e, m in [0.5, 1)."""
    _, exponent = torch.frexp(weights.float())
    return torch.ldexp(torch.ones_like(weights, dtype=torch.float32), exponent - 8)


def is_tied(model: nn.Module) -> bool:
    """Return whether the head's matrix is the embedding's."""
    plain = base_model(model)
    head = plain.get_output_embeddings()
    return head is not None and head.weight is plain.get_input_embeddings().weight
