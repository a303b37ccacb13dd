"""A critic, a batch with values, and what plain autograd makes of both."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import Lora, Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.critic import TorchCritic, build_critic
from lockstep.types import Batch, LossInput, LossOutput, TrainSequence
from tests.learner.batches import Gradients, make_batch
from tests.learner.models import plain, tokens, twin

CLIP = 0.2
KINDS = ("full", "bf16", "lora")
BACKBONES = ("own", "shared")


def recipe(kind: str = "full", critic: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "algorithm": {"kind": "ppo", "critic": {"lr": 1e-3, "value_clip": CLIP} | (critic or {})},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "steps": 20,
    }
    if kind == "lora":
        settings["adapter"] = {"kind": "lora", "rank": 4}
    return Recipe.model_validate(settings | sections)


def policy(kind: str, family: str = "llama-tied", dtype: torch.dtype = torch.float32) -> nn.Module:
    model: Any = twin(plain(family, dtype=torch.bfloat16 if kind == "bf16" else dtype))
    if kind != "lora":
        return model  # type: ignore[no-any-return]
    model = attach(model, Lora(rank=4), seed=0)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # adapters that do something
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def with_head(critic: TorchCritic, seed: int = 3) -> TorchCritic:
    """The critic with a head that says something: values a few tenths wide."""
    generator = torch.Generator().manual_seed(seed)
    weights = critic.weights()
    drawn_H = torch.randn(weights["value_head.weight"].shape, generator=generator, dtype=torch.float64)
    weights["value_head.weight"].copy_(0.05 * drawn_H)
    weights["value_head.bias"].fill_(0.1)
    return critic


def valued(batch: Batch, values: list[tuple[float, ...]] | None = None, seed: int = 7) -> Batch:
    """Returns around 0.5, and old values within and beyond the clip range of `values`; 9.9 where not trained."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(sequence: TrainSequence, around: tuple[float, ...], scale: float) -> tuple[float, ...]:
        noise = (torch.randn(len(sequence.ids), generator=generator, dtype=torch.float64) * scale).tolist()
        return tuple(a + n if t else 9.9 for a, n, t in zip(around, noise, sequence.trained, strict=True))

    rows = values or [(0.0,) * len(s.ids) for s in batch.sequences]
    return replace(
        batch,
        sequences=tuple(
            replace(s, values=numbers(s, row, 0.3), returns=numbers(s, (0.5,) * len(s.ids), 1.0))
            for s, row in zip(batch.sequences, rows, strict=True)
        ),
    )


def plain_values(model: nn.Module, head: dict[str, Tensor], sequence: TrainSequence) -> Tensor:
    """Value of each trained token by transformers' own forward pass of one sequence, without packing."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.ids]])
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    hidden_TH = decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
    before_TH = hidden_TH[len(sequence.prompt_ids) - 1 : -1][torch.tensor(sequence.trained)]
    return before_TH.to(head["value_head.weight"].dtype) @ head["value_head.weight"] + head["value_head.bias"]  # type: ignore[no-any-return]


def plain_value_loss(model: nn.Module, head: dict[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
    """Σ weight · ½·max((V-R)², (clip(V, V_old ± 0.2) - R)²), token by token; and the share of tokens that are clipped."""
    total, clipped, count = torch.zeros((), dtype=torch.float64), 0, 0
    for sequence in batch.sequences:
        assert sequence.values is not None
        assert sequence.returns is not None
        kept = [i for i, trained in enumerate(sequence.trained) if trained]
        for value, i in zip(plain_values(model, head, sequence), kept, strict=True):
            old, wanted = sequence.values[i], sequence.returns[i]
            near = value
            if value > old + CLIP:
                near = torch.full_like(value, old + CLIP)
            if value < old - CLIP:
                near = torch.full_like(value, old - CLIP)
            free, held = (value - wanted) ** 2, (near - wanted) ** 2
            clipped, count = clipped + int(held > free), count + 1
            total = total + sequence.weight * 0.5 * (held if held > free else free)
    return total, clipped / count


def plain_value_gradients(family: str, head: dict[str, Tensor], batch: Batch) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, clipped share, and gradients of head and decoder by autograd alone, in float64."""
    model = plain(family, dtype=torch.float64, attention="sdpa")
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in head.items()}
    total, clipped = plain_value_loss(model, leaves, batch)
    total.backward()
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    gradients = {name: p.grad for name, p in decoder.named_parameters()}
    return float(total.detach()), clipped, gradients | {name: leaf.grad for name, leaf in leaves.items()}


FAMILY = "starcoder2"  # LayerNorm: float64 throughout; and a sliding window


@cache
def example(prefix: int = 0) -> tuple[Batch, dict[str, Tensor], float, float, dict[str, Tensor]]:
    """A batch, a head, and what plain autograd makes of them."""
    given = recipe()
    critic = with_head(build_critic(policy("full", FAMILY, torch.float64), given))
    head = {name: t.clone() for name, t in critic.weights().items() if name.startswith("value_head.")}
    batch = make_batch(old=False, ref=False)
    if prefix:
        begins = tokens(prefix, 5)
        longer = tuple(replace(s, prompt_ids=(*begins, *s.prompt_ids)) for s in batch.sequences)
        batch = replace(batch, sequences=longer, prefix=prefix)
    batch = valued(batch, critic.values(batch.sequences))
    return batch, head, *plain_value_gradients(FAMILY, head, batch)


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert grad.abs().max() > 0, name
        assert float((ours[name] - grad).abs().max() / grad.abs().max()) < tolerance, name


def gradients_of(critic: TorchCritic, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of one update of the critic alone, and its summed gradients by weight name."""
    names = {name.replace(".", "/"): name for name in critic.trainable}  # a dot would nest
    together = nn.ParameterDict({key: critic.trainable[name] for key, name in names.items()})
    with Gradients(together) as gradients:
        metrics = critic.update(batch)
    return metrics, {names[key]: grad for key, grad in gradients.of.items()}


def policy_loss(inputs: LossInput) -> LossOutput:
    return LossOutput(-inputs.logprobs_T * inputs.advantages_T)
