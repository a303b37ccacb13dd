"""Batches with everything that can differ between sequences, and what they cost when computed the plain way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lockstep.config.schema import Recipe
from lockstep.learner.learner import TorchLearner
from lockstep.types import Batch, Loss, LossInput, TrainSequence
from tests.learner.models import logits_of, tokens

SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = ((5, (1, 4, 9)), (1, (3, 3)), (12, (1,)), (20, (14, 2, 14, 7)))
"""Prompt length and response lengths of each group."""


def make_batch(temperature: float = 1.0, *, masked: bool = True, old: bool = True, ref: bool = True) -> Batch:
    """Ten sequences in four groups; numbers are random but reproducible."""
    generator = torch.Generator().manual_seed(0)

    def numbers(count: int, shift: float, scale: float) -> tuple[float, ...]:
        return tuple((torch.randn(count, generator=generator, dtype=torch.float64) * scale + shift).tolist())

    sequences = []
    for group, (prompt, responses) in enumerate(SHAPES):
        for length in responses:
            number = len(sequences)
            trained = [not (masked and length > 2 and (place + number) % 3 == 0) for place in range(length)]
            sequences.append(
                TrainSequence(
                    tokens(prompt, 100 + group),
                    tokens(length, 200 + number),
                    tuple(trained),
                    numbers(length, -5, 0.5),
                    numbers(length, 0, 1),
                    0.02 * (1 + number),
                    group,
                    numbers(length, -5, 0.1) if old else None,
                    numbers(length, -5, 1) if ref else None,
                )
            )
    return Batch(tuple(sequences), temperature, kl_coef=0.3 if ref else 0.0)


def plain_gradients(model: nn.Module, batch: Batch, loss: Loss) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by transformers' forward pass and autograd, one sequence at a time: no packing, no sharing."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for sequence in batch.sequences:
        inputs = plain_inputs(model, sequence, batch.temperature, batch.kl_coef)
        if inputs.logprobs_T.numel():
            value = sequence.weight * loss(inputs).loss_T.sum()
            value.backward()
            total += float(value.detach())
    zero = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return total, zero


def plain_inputs(model: nn.Module, sequence: TrainSequence, temperature: float, kl_coef: float = 0.0) -> LossInput:
    """What a loss sees of one sequence."""
    prompt = len(sequence.prompt_ids)
    logits_TV = logits_of(model, (*sequence.prompt_ids, *sequence.ids))[prompt - 1 : -1]
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    logprobs_T = logprobs_TV.gather(-1, torch.tensor(sequence.ids)[:, None])[:, 0]
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    kept = torch.tensor(sequence.trained)

    def constant(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=logits_TV.dtype)[kept]

    own_T = logprobs_T[kept]
    return LossInput(
        own_T,
        own_T.detach() if sequence.old_logprobs is None else constant(sequence.old_logprobs),
        constant(sequence.rollout_logprobs),
        constant(sequence.advantages),
        entropy_T[kept],
        torch.zeros(int(kept.sum()), dtype=torch.int64),
        1,
        None if sequence.ref_logprobs is None else constant(sequence.ref_logprobs),
        kl_coef,
    )


class Gradients(AbstractContextManager["Gradients"]):
    """Collects what the backward passes of an update bring to each parameter, in float64."""

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[str, Tensor] = {}
        self._handles = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.of[name] = torch.zeros_like(parameter, dtype=torch.float64)
                self._handles.append(parameter.register_hook(self._adder(name)))

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        def add(grad: Tensor) -> None:
            self.of[name] += grad.double()

        return add

    def __exit__(self, *failure: object) -> None:
        for handle in self._handles:
            handle.remove()


def learner_gradients(
    model: nn.Module, batch: Batch, loss: Loss, recipe: Recipe
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and summed gradients of one update of a learner."""
    learner = TorchLearner(model, recipe)
    with Gradients(model) as gradients:
        metrics = learner.update(batch, loss)
    return metrics, gradients.of
