"""Routing replay: the experts that sampling chose are trained, with the probabilities of today."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Recipe
from lockstep.errors import LearnerError, ModelError
from lockstep.learner.critic import build_critic
from lockstep.learner.learner import TorchLearner
from lockstep.models.routing import Routing
from lockstep.rollout.native import NativeEngine
from lockstep.types import Batch, Sampling, TrainSequence
from tests.learner.batches import learner_gradients
from tests.learner.critics import with_head
from tests.learner.models import plain, tokens, twin
from tests.rollout.engines import finish, request, spelled

ROUTED = ("qwen3-moe", "gpt-oss", "glm4-moe", "deepseek-v3", "mixtral", "qwen3-next")


def recipe(**update: object) -> Recipe:
    algorithm = {"kind": "grpo", "kl": {"coef": 0.0}}
    return Recipe.model_validate({"algorithm": algorithm, "update": update, "optimizer": {"kind": "adamw", "lr": 0.0}})


LOSS = build_objective(recipe()).loss
ON = recipe(replay_routing=True)


def recorded(model: nn.Module, prefix: int = 0) -> Batch:
    """Two groups of three samples, with the experts that the engine sent them to."""
    engine = NativeEngine(model, slots=2, stop_ids=frozenset(), decode=spelled, routes=True)
    engine.load(iter(()), 0)
    begins = tokens(prefix, 77)
    wanted = [
        request(f"{g}/{i}", (*begins, *tokens(4 + 9 * g, g)), Sampling(5 + 3 * i), group=str(g), seed=i, prefix=prefix)
        for g in range(2)
        for i in range(3)
    ]
    done = finish(engine, wanted)
    row = Routing.of(model).row
    sequences = []
    for number, one in enumerate(wanted):
        sample = done[one.id]
        count = len(sample.ids)
        assert len(sample.routes) == row.numbers * (len(one.prompt_ids) + count - 1)
        advantages = tuple(0.3 * (place + number) - 1 for place in range(count))
        sequences.append(
            TrainSequence(
                one.prompt_ids,
                sample.ids,
                (True,) * count,
                sample.logprobs,
                advantages,
                0.1,
                int(one.group),
                routes=sample.routes,
            )
        )
    return Batch(tuple(sequences), prefix=prefix)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("prefix", [0, 5])
def test_its_own_routing_changes_nothing(family: str, prefix: int) -> None:
    model = twin(plain(family))
    batch = recorded(model, prefix)
    off, wanted = learner_gradients(twin(plain(family)), batch, LOSS, recipe())
    on, found = learner_gradients(model, batch, LOSS, ON)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), "bit by bit"
    assert on["routes/differ"] == 0.0
    assert "routes/differ" not in off
    assert on["loss/policy"] == off["loss/policy"]


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_other_experts_are_taken_and_probabilities_stay_live(family: str) -> None:
    """Routers that were changed after sampling would choose others. Replayed, it is what a loop over the recorded ones gives."""
    model = twin(plain(family))
    batch = recorded(model)
    changed = twin(plain(family))
    with torch.no_grad():
        for router in Routing.of(changed).routers:
            router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(4)))
    learner = TorchLearner(changed, ON)
    own = TorchLearner(changed, recipe()).response_logprobs(batch.sequences, 1.0)
    replayed = learner.response_logprobs(batch.sequences, 1.0)
    assert max(abs(a - b) for x, y in zip(own, replayed, strict=True) for a, b in zip(x, y, strict=True)) > 0.01
    metrics, gradients = learner_gradients(changed, batch, LOSS, ON)
    assert metrics["routes/differ"] > 0.3
    routers = [name for name in gradients if "router.weight" in name or "gate.weight" in name]
    assert len(routers) == 2
    assert all(gradients[name].abs().max() > 0 for name in routers)


def test_a_token_has_the_experts_of_its_record() -> None:
    model = twin(plain("qwen3-moe"))
    batch = recorded(model)
    routing = Routing.of(model)
    fixed = tuple(
        replace(s, routes=routing.row.pack(torch.tensor([[3, 1, 0, 2]]).repeat(len(s.routes) // 4, 1).numpy()))
        for s in batch.sequences
    )
    seen: list[torch.Tensor] = []
    for router in routing.routers:
        router.register_forward_hook(lambda _, __, answer: seen.append(answer[2]))
    TorchLearner(model, ON).response_logprobs(fixed, 1.0)
    real = sum(len(s.ids) - 1 for s in fixed) + len(fixed[0].prompt_ids) + len(fixed[3].prompt_ids)
    assert (seen[0][:real] == torch.tensor([3, 1])).all()
    assert (seen[1][:real] == torch.tensor([0, 2])).all()
    padding = seen[0][real:]
    assert len(padding) > 0
    assert (padding.sort(1).values != torch.tensor([1, 3])).any(), "padding goes where its own scores send it"


def test_a_wrong_record_is_refused_or_counted() -> None:
    model = twin(plain("qwen3-moe"))
    batch = recorded(model)
    learner = TorchLearner(model, ON)

    def scored(change: bytes) -> None:
        learner.response_logprobs((replace(batch.sequences[0], routes=change),), 1.0)

    right = batch.sequences[0].routes
    for wrong, says in (
        (b"", "routes are for 0 tokens"),
        (right[:-4], "but their sequence needs between"),
        (right + right[:4], "but their sequence needs between"),
        (bytes([9]) + right[1:], "name expert 9, but the model has only experts 0 to 3"),
        (right[1:2] + right[1:], "one expert twice"),
    ):
        with pytest.raises(LearnerError, match=says):
            scored(wrong)
    swapped = [replace(s, routes=bytes(3 - x for x in s.routes)) for s in batch.sequences]
    metrics = learner.update(replace(batch, sequences=tuple(swapped)), LOSS)
    assert metrics["routes/differ"] > 0.3


def test_a_model_without_experts_has_nothing_to_replay() -> None:
    with pytest.raises(ModelError, match="no layer of LlamaForCausalLM is a router"):
        TorchLearner(twin(plain("llama")), ON)


def test_a_shared_critic_follows_the_record_whatever_ran_before() -> None:
    """Its values are of the states that the update sees, and not of those by the routes of the last pass."""
    on = recipe(replay_routing=True, tokens_per_microbatch=40).model_dump()
    given = Recipe.model_validate(on | {"algorithm": {"kind": "ppo", "critic": {"backbone": "shared"}}})
    model = twin(plain("qwen3-moe"))
    batch = recorded(model)
    learner, critic = TorchLearner(model, given), with_head(build_critic(model, given))
    wanted = critic.values(batch.sequences)
    learner.response_logprobs(batch.sequences, 1.0)
    assert critic.values(batch.sequences) == wanted
    first = batch.sequences[0]
    other = replace(first, routes=bytes([3, 1, 0, 2]) * (len(first.routes) // 4))
    assert critic.values([other])[0] != wanted[0]
