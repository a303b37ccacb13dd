"""What PPO's critic shares with the policy, and nothing else: memory, proofs, gradients of a common backbone, schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from lockstep.learner.critic import build_critic
from lockstep.learner.learner import TorchLearner
from lockstep.sync.fingerprint import fingerprint
from tests.learner.batches import Gradients, make_batch, plain_gradients
from tests.learner.critics import BACKBONES, FAMILY, KINDS, example, policy, policy_loss, recipe, valued, with_head
from tests.learner.models import plain


# --- what is shared -------------------------------------------------------------------------------------------------
def storages(tensors: Any) -> dict[int, int]:
    """Address → bytes of the memory behind some tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_with_adapters_the_frozen_base_is_in_memory_once():
    model = policy("lora")
    critic = build_critic(model, recipe("lora"))
    policys = storages(model.parameters())
    added = {a: n for a, n in storages(critic.decoder.parameters()).items() if a not in policys}
    adapters = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert sum(added.values()) == adapters, "only a second set of adapters"
    assert not storages(critic.weights().values()).keys() & policys.keys(), "nothing that is trained is shared"
    assert {n for n in critic.weights() if ".lora_" not in n} == {"value_head.weight", "value_head.bias"}
    assert sum(".lora_" in n for n in critic.weights()) == sum(p.requires_grad for p in model.parameters())


def test_in_full_training_the_critic_has_all_weights_but_the_head_of_the_vocabulary():
    model = policy("full", "llama")  # its head is not tied
    critic = build_critic(model, recipe())
    assert not storages(critic.weights().values()).keys() & storages(model.parameters()).keys()
    decoder = {name.removeprefix("model.") for name, _ in model.named_parameters() if name != "lm_head.weight"}
    assert set(critic.weights()) == decoder | {"value_head.weight", "value_head.bias"}


def test_a_shared_critic_adds_a_head_alone():
    model = policy("full")
    critic = build_critic(model, recipe(critic={"backbone": "shared"}))
    assert set(critic.weights()) == {"value_head.weight", "value_head.bias"}
    assert storages(critic.decoder.parameters()).keys() <= storages(model.parameters()).keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_proof_of_sync_does_not_see_the_critic(kind: str, backbone: str):
    """Names and fingerprint of the policy's weights, before and after updates of the critic alone."""
    alone = TorchLearner(policy(kind), recipe(kind))
    model = policy(kind)
    critic = build_critic(model, recipe(kind, {"backbone": backbone}))
    learner = TorchLearner(model, recipe(kind), value=critic.joint)
    for _ in range(3):
        critic.update(valued(make_batch(old=False, ref=False)))
    found, wanted = fingerprint(learner.weights()), fingerprint(alone.weights())
    assert found.tensors.keys() == wanted.tensors.keys()
    assert found.combined == wanted.combined
    assert learner.trainable.keys() == alone.trainable.keys()
    assert all(p.grad is None for p in model.parameters()), "nothing waits for the policy's next step"


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_critic_does_not_see_the_policys_updates(kind: str):
    model, batch = policy(kind), valued(make_batch(old=False, ref=False))
    critic = with_head(build_critic(model, recipe(kind)))
    learner = TorchLearner(model, recipe(kind), value=critic.joint)
    before, policys = critic.values(batch.sequences), learner.logprobs([batch.sequences[2].ids])
    metrics = learner.update(batch, policy_loss)
    assert critic.values(batch.sequences) == before
    assert learner.logprobs([batch.sequences[2].ids]) != policys
    assert not any(name.startswith("critic/") for name in metrics)


# --- a shared backbone ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("coef", [0.5, 3.0])
def test_a_shared_backbone_gets_the_sum_of_both_gradients(coef: float, budget: int):
    batch, _, _, _, of_values = example()
    _, of_policy = plain_gradients(plain(FAMILY, dtype=torch.float64, attention="sdpa"), batch, policy_loss)
    given = recipe(critic={"backbone": "shared", "coef": coef}, update={"tokens_per_microbatch": budget})
    model = policy("full", FAMILY, torch.float64)
    critic = with_head(build_critic(model, given))
    learner = TorchLearner(model, given, value=critic.joint)
    assert critic.joint is not None
    with Gradients(model) as of_model, Gradients(critic.joint.head) as of_head:
        metrics = learner.update(batch, policy_loss)
    for name, grad in of_model.of.items():
        expected = of_policy[name] + coef * of_values.get(name.removeprefix("model."), torch.zeros(()))
        assert float((grad - expected).abs().max() / expected.abs().max()) < 1e-11, name
    for name, grad in of_head.of.items():
        torch.testing.assert_close(grad, coef * of_values[f"value_head.{name}"], rtol=1e-11, atol=1e-13)
    norms = [math.sqrt(sum(float((g**2).sum()) for g in grads.values())) for grads in (of_model.of, of_head.of)]
    assert metrics["grad/norm"] == pytest.approx(norms[0]), "each has its own norm and is clipped by it"
    assert metrics["critic/grad_norm"] == pytest.approx(norms[1])


def test_the_policys_own_loss_is_reported_without_the_critics():
    batch, *_ = example()
    reported = {}
    for backbone in BACKBONES:
        model = policy("full", FAMILY, torch.float64)
        given = recipe(critic={"backbone": backbone})
        critic = with_head(build_critic(model, given))
        reported[backbone] = TorchLearner(model, given, value=critic.joint).update(batch, policy_loss)
    assert reported["own"]["loss/policy"] == reported["shared"]["loss/policy"]
    assert reported["shared"]["critic/loss"] > 0


def test_head_and_policy_have_their_own_rates_on_one_schedule():
    """The first step of Adam moves every weight by its learning rate: 2e-3 and 1e-4, halved by the warm-up."""
    optimizer = {"kind": "adamw", "lr": 1e-4, "schedule": "linear", "warmup_steps": 2}
    given = recipe(critic={"backbone": "shared", "lr": 2e-3}, optimizer=optimizer)
    model = policy("full", FAMILY, torch.float64)
    critic = build_critic(model, given)
    learner = TorchLearner(model, given, value=critic.joint)
    before = model.model.layers[0].mlp.c_fc.weight.detach().clone()  # type: ignore[union-attr, index]
    batch = valued(make_batch(old=False, ref=False))
    rates = [(m["critic/lr"], m["lr"]) for m in [learner.update(batch, policy_loss)]]
    moved = critic.weights()["value_head.weight"].abs()
    assert moved.min() == pytest.approx(1e-3, rel=1e-3)
    assert moved.max() == pytest.approx(1e-3, rel=1e-3)
    shift = (model.model.layers[0].mlp.c_fc.weight.detach() - before).abs()  # type: ignore[union-attr, index]
    assert shift.max() == pytest.approx(0.5e-4, rel=1e-3)
    rates += [(m["critic/lr"], m["lr"]) for m in [learner.update(batch, policy_loss) for _ in range(19)]]
    assert [value / rate for value, rate in rates] == pytest.approx([20.0] * 20)
    assert rates[1][0] == pytest.approx(2e-3)
    assert rates[-1][0] == pytest.approx(2e-3 / 18)


def test_the_policys_schedule_spans_its_own_updates_and_the_critics_all():
    """Of 20 steps the first 5 are the critic's alone: the policy's rate falls to 0 over 15, the critic's over 20."""
    critic_of = {"backbone": "own", "lr": 1.0, "warmup_steps": 5}
    given = recipe(critic=critic_of, optimizer={"kind": "adamw", "lr": 1e-3, "schedule": "linear"})
    model, batch = policy("full"), valued(make_batch(old=False, ref=False))
    critic = build_critic(model, given)
    learner = TorchLearner(model, given, value=critic.joint)
    assert [critic.update(batch)["critic/lr"] for _ in range(3)] == pytest.approx([1, 19 / 20, 18 / 20])
    assert [learner.update(batch, policy_loss)["lr"] for _ in range(2)] == pytest.approx([1e-3, 1e-3 * 14 / 15])


def test_the_head_of_a_shared_critic_is_trained_beside_a_policy_with_muon():
    """The head has no matrix for Muon; the policy, whose optimizer is another, has some."""
    given = recipe(critic={"backbone": "shared"}, optimizer={"kind": "muon", "lr": 3e-3})
    model, batch = policy("full"), valued(make_batch(old=False, ref=False))
    critic = build_critic(model, given)
    before = {name: weight.clone() for name, weight in critic.weights().items()}
    TorchLearner(model, given, value=critic.joint).update(batch, policy_loss)
    assert all(not torch.equal(weight, before[name]) for name, weight in critic.weights().items())


def test_a_warm_up_that_leaves_the_policy_no_step_is_refused():
    with pytest.raises(ValidationError, match=r"warmup_steps=20 leaves the policy no step: the run has 20"):
        recipe(critic={"warmup_steps": 20})
    with pytest.raises(ValidationError, match=r"optimizer\.warmup_steps=15 never ends: the run has 15 optimizer steps"):
        recipe(critic={"warmup_steps": 5}, optimizer={"kind": "adamw", "warmup_steps": 15})


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_a_shared_critic_alone_moves_only_its_head(kind: str):
    model, batch = policy(kind), valued(make_batch(old=False, ref=False))
    critic = build_critic(model, recipe(kind, {"backbone": "shared"}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = critic.values(batch.sequences)
    critic.update(batch)
    assert critic.values(batch.sequences) != values
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
