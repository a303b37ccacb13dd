"""Tiny learners whose memory is counted: a sequence of a prompt and one token runs through attention in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models.attention import NAME
from lockstep.types import Batch, LossInput, LossOutput, TrainSequence
from tests.plan.counting import LiveBytes

LORA = "adapter={kind: lora, rank: 8}"


def tiny(family: str, dtype: torch.dtype, **sizes: object) -> Any:
    """A random model whose widths are unlike each other, with Lockstep's attention."""
    widths = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    other = {"vocab_size": 512, "num_hidden_layers": 3, "head_dim": 32, "pad_token_id": 0}
    config = getattr(hf, f"{family}Config")(**(widths | other | {"max_position_embeddings": 4096} | sizes))
    config._attn_implementation = NAME
    model = getattr(hf, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def recipe(*overrides: str) -> Recipe:
    return load(["task={kind: reasoning_gym}", "device=cpu", *overrides])


def learner(model: Any, of: Recipe) -> tuple[nn.Module, TorchLearner]:
    """The model that is trained, adapters included, and its learner."""
    trained = attach(model, of.adapter, 0)
    return trained, TorchLearner(trained, of)


def batch(lengths: Sequence[int], trained: int = 1) -> Batch:
    """Prompts of these lengths, each with so many trained tokens behind it."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 500, (count,), generator=generator).tolist())

    lists = (True,) * trained, (-1.0,) * trained, (1.0,) * trained
    return Batch(tuple(TrainSequence(ids(n), ids(trained), *lists, 1.0, group) for group, n in enumerate(lengths)))


def loss(inputs: LossInput) -> LossOutput:
    weighted: Tensor = -inputs.logprobs_T * inputs.advantages_T
    return LossOutput(weighted)


def alive_between_passes(model: Any, of: Recipe, lengths: Sequence[int]) -> int:
    """Bytes that the forward pass of one micro-batch leaves for its backward pass."""
    _, trained = learner(model, of)
    found = []
    with LiveBytes() as live:

        def counting(inputs: LossInput) -> LossOutput:
            found.append(live.now)
            return loss(inputs)

        trained.update(batch(lengths), counting)
    return found[0]
