"""PPO's critic: its values and gradients are those of a plain forward pass, and it survives failures and restarts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config.schema import Lora, Recipe
from lockstep.errors import CheckpointError, LearnerError
from lockstep.learner.adapters import attach
from lockstep.learner.critic import TorchCritic, build_critic
from lockstep.models.merged_weights import merged_of
from lockstep.types import Batch, TrainSequence
from tests.learner.batches import make_batch
from tests.learner.critics import (
    BACKBONES,
    FAMILY,
    KINDS,
    close,
    example,
    gradients_of,
    plain_values,
    policy,
    recipe,
    valued,
    with_head,
)
from tests.learner.models import plain, twin


# --- values ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("prefix", [0, 11])
def test_values_are_those_of_a_plain_forward_pass(backbone: str, share: bool, budget: int, prefix: int):
    batch, head, *_ = example(prefix)
    given = recipe(critic={"backbone": backbone}, update={"tokens_per_microbatch": budget, "share_prompts": share})
    critic = with_head(build_critic(policy("full", FAMILY, torch.float64), given))
    found = critic.values(batch.sequences, prefix=batch.prefix)
    reference = plain(FAMILY, dtype=torch.float64, attention="sdpa")
    with torch.no_grad():
        for sequence, row in zip(batch.sequences, found, strict=True):
            assert len(row) == len(sequence.ids)
            assert all(value == 0 for value, trained in zip(row, sequence.trained, strict=True) if not trained)
            kept = [value for value, trained in zip(row, sequence.trained, strict=True) if trained]
            assert kept == pytest.approx(plain_values(reference, head, sequence).tolist(), abs=1e-12)
    assert max(max(row) for row in found) - min(min(row) for row in found) > 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_value_is_zero_before_the_first_update(kind: str, backbone: str):
    batch = valued(make_batch(old=False, ref=False))
    critic = build_critic(policy(kind), recipe(kind, {"backbone": backbone}))
    assert critic.values(batch.sequences) == [(0.0,) * len(s.ids) for s in batch.sequences]
    head = {name: t for name, t in critic.weights().items() if name.startswith("value_head.")}
    assert {t.dtype for t in head.values()} == {torch.float32}, "the head is wide whatever the model is"
    critic.update(batch)
    assert all(v != 0 for row in critic.values(make_batch(masked=False).sequences) for v in row)


def test_a_critic_computes_with_its_own_adapter_merged_as_it_is_after_an_update():
    given = recipe("lora").model_copy(update={"adapter": Lora(rank=4, merged=True)})
    model = attach(twin(plain("llama-tied")), given.adapter, seed=0)
    critic, batch = build_critic(model, given), valued(make_batch(old=False, ref=False))
    own, policys = merged_of(critic.decoder), [one.weight().clone() for one in merged_of(model)]
    assert len(own) == len(policys) == 14
    critic.values(batch.sequences)
    for _ in range(2):  # the head begins with zeros, which pass no gradient on
        critic.update(batch)
    made = [one.weight().clone() for one in own]
    for one in own:
        one.forget()
    assert all(torch.equal(one.weight(), right) for one, right in zip(own, made, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(made, policys, strict=True))
    assert all(torch.equal(one.weight(), right) for one, right in zip(merged_of(model), policys, strict=True))


def test_adapters_of_the_policy_are_in_the_values():
    """The critic starts from the policy as it is, its adapters on."""
    model, batch = policy("lora"), make_batch(old=False, ref=False)
    found = with_head(build_critic(model, recipe("lora"))).values(batch.sequences)
    with model.disable_adapter():  # type: ignore[operator]
        off = with_head(build_critic(model, recipe("lora", {"backbone": "shared"}))).values(batch.sequences)
    shared = with_head(build_critic(model, recipe("lora", {"backbone": "shared"}))).values(batch.sequences)
    assert found == shared
    assert max(abs(a - b) for x, y in zip(found, off, strict=True) for a, b in zip(x, y, strict=True)) > 0.05


# --- gradients of an own critic -------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 24, 60, 10_000])
@pytest.mark.parametrize("prefix", [0, 11])
def test_gradients_are_those_of_plain_autograd_however_it_is_split(budget: int, share: bool, prefix: int):
    batch, _, loss, clipped, theirs = example(prefix)
    given = recipe(update={"tokens_per_microbatch": budget, "share_prompts": share})
    critic = with_head(build_critic(policy("full", FAMILY, torch.float64), given))
    metrics, ours = gradients_of(critic, batch)
    close(ours, theirs)
    assert metrics["critic/grad_norm"] == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in theirs.values())))
    assert metrics["critic/clip_share"] == pytest.approx(clipped)
    assert 0.1 < clipped < 0.9, "both branches are taken"
    assert loss > 0


def test_the_order_of_sequences_does_not_matter():
    batch, _, _, _, theirs = example()
    given = recipe(update={"tokens_per_microbatch": 40})
    critic = with_head(build_critic(policy("full", FAMILY, torch.float64), given))
    _, ours = gradients_of(critic, replace(batch, sequences=batch.sequences[::-1]))
    close(ours, theirs)


def test_parts_of_a_batch_add_up():
    """The sequences carry their weights: the gradients of two halves, on two ranks say, sum to that of the whole."""
    batch, _, _, _, theirs = example()
    summed: dict[str, Tensor] = {}
    for half in (batch.sequences[:4], batch.sequences[4:]):
        critic = with_head(build_critic(policy("full", FAMILY, torch.float64), recipe()))
        _, part = gradients_of(critic, replace(batch, sequences=half))
        summed = {name: summed.get(name, 0) + grad for name, grad in part.items()}
    close(summed, theirs)


def test_without_a_clip_range_the_loss_is_half_the_square():
    batch, _, *_ = example()
    critic = with_head(build_critic(policy("full", FAMILY, torch.float64), recipe(critic={"value_clip": None})))
    values = critic.values(batch.sequences)
    squares = [
        (v - r) ** 2 / 2
        for row, s in zip(values, batch.sequences, strict=True)
        for v, r, trained in zip(row, s.returns or (), s.trained, strict=True)
        if trained
    ]
    metrics = critic.update(batch)
    assert metrics["critic/loss"] == pytest.approx(sum(squares) / len(squares))
    assert metrics["critic/clip_share"] == 0


@pytest.mark.parametrize(("mode", "expected"), [("none", 1), ("selective", 1), ("full", 2)])
def test_recomputed_activations_give_the_same_gradients(mode: str, expected: int):
    batch, *_, theirs = example()
    model = policy("full", FAMILY, torch.float64)
    critic = with_head(build_critic(model, recipe(update={"recompute": mode})))
    passes: list[int] = []
    next(m for m in critic.decoder.modules() if type(m).__name__ == "Starcoder2MLP").register_forward_pre_hook(
        lambda *_: passes.append(1)
    )
    close(gradients_of(critic, batch)[1], theirs)
    assert len(passes) == expected


@pytest.mark.parametrize("backward", [False, True])
def test_a_micro_batch_that_does_not_fit_is_run_in_halves(backward: bool):
    """Memory runs out in the forward pass, or in the backward pass when the gradients of some weights are complete."""
    batch, *_, theirs = example()
    critic = with_head(build_critic(policy("full", FAMILY, torch.float64), recipe()))
    whole = critic.values(batch.sequences)
    seen: list[int] = []

    def full(_: Any, grads: Any) -> None:
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def layer(_: Any, inputs: Any, output: Tensor) -> None:
        seen.append(output.shape[1])
        if not backward:
            full(None, None)
        output.register_hook(lambda grad: full(None, grad))

    handle = critic.decoder.layers[0].mlp.c_fc.register_forward_hook(layer)  # type: ignore[union-attr, index]
    metrics, ours = gradients_of(critic, batch)
    handle.remove()
    assert len(seen) == 3
    assert seen[0] > max(seen[1:])
    close(ours, theirs)
    assert metrics["critic/oom_splits"] == 1
    values_T = torch.tensor(
        [v for row, s in zip(whole, batch.sequences, strict=True) for v, t in zip(row, s.trained, strict=True) if t]
    )
    assert metrics["critic/value_mean"] == pytest.approx(float(values_T.mean()), rel=1e-5), "each token is counted once"


@pytest.mark.parametrize("backbone", BACKBONES)
def test_an_update_reports_what_it_did(backbone: str):
    batch, *_ = example()
    critic = with_head(build_critic(policy("full", FAMILY, torch.float64), recipe(critic={"backbone": backbone})))
    values = critic.values(batch.sequences)
    pairs = [
        (v, r)
        for row, s in zip(values, batch.sequences, strict=True)
        for v, r, trained in zip(row, s.returns or (), s.trained, strict=True)
        if trained
    ]
    value_T, return_T = torch.tensor(pairs, dtype=torch.float64).T
    metrics = critic.update(batch)
    assert metrics["critic/value_mean"] == pytest.approx(float(value_T.mean()))
    explained = 1 - (return_T - value_T).var() / return_T.var()
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained))
    assert metrics["critic/lr"] == 1e-3
    assert metrics["critic/skipped"] == 0


def test_returns_that_are_all_equal_have_no_variance_to_explain():
    batch = make_batch(old=False, ref=False)
    flat = [replace(s, values=(0.0,) * len(s.ids), returns=(1.0,) * len(s.ids)) for s in batch.sequences]
    metrics = build_critic(policy("full"), recipe()).update(Batch(tuple(flat)))
    assert metrics["critic/loss"] == pytest.approx(0.5)
    assert "critic/explained_variance" not in metrics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_training_explains_more_of_the_variance(kind: str, backbone: str):
    """Returns that depend on the tokens seen: a few updates fit them, the more so with a backbone to train."""
    batch = make_batch(masked=False, old=False, ref=False)

    def wanted(s: TrainSequence) -> tuple[float, ...]:
        return tuple(float(before % 2) for before in (s.prompt_ids[-1], *s.ids[:-1]))

    taught = [replace(s, values=(0.0,) * len(s.ids), returns=wanted(s), weight=1 / 57) for s in batch.sequences]
    critic = build_critic(policy(kind), recipe(kind, {"backbone": backbone, "lr": 1e-2, "value_clip": None}))
    seen = [critic.update(Batch(tuple(taught)))["critic/explained_variance"] for _ in range(15)]
    assert seen[0] == pytest.approx(0, abs=1e-6)
    assert seen[-1] > (0.8 if backbone == "own" else 0.3)


# --- failures and state ---------------------------------------------------------------------------------------------
def test_a_recipe_without_a_critic_builds_none():
    with pytest.raises(LearnerError, match="the recipe has no critic"):
        build_critic(policy("full"), Recipe())


@pytest.mark.parametrize("field", ["values", "returns"])
def test_a_batch_without_values_or_returns_is_refused(field: str):
    batch = valued(make_batch(old=False, ref=False))
    bare = replace(batch, sequences=tuple(replace(s, **{field: None}) for s in batch.sequences))  # type: ignore[arg-type]
    with pytest.raises(LearnerError, match="no values or returns"):
        build_critic(policy("full"), recipe()).update(bare)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_changes_no_bit_and_is_counted(kind: str):
    batch = valued(make_batch(old=False, ref=False))
    absurd = replace(batch.sequences[2], returns=(1e300,) * 9)
    bad = replace(batch, sequences=(*batch.sequences[:2], absurd, *batch.sequences[3:]))
    critic = build_critic(policy(kind), recipe(kind, update={"max_skipped": 3}))
    critic.update(batch)
    before = snapshot(critic)
    assert critic.update(bad)["critic/skipped"] == 1
    assert critic.update(bad)["critic/skipped"] == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in snapshot(critic).items())
    with pytest.raises(
        LearnerError, match=r"3 critic steps in a row were skipped: the gradient norm is (inf|nan)"
    ) as caught:
        critic.update(bad)
    assert "optimizer step 4" in str(caught.value)


def snapshot(critic: TorchCritic) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in critic.tensors().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_three_steps_saved_and_three_more_are_six(kind: str, backbone: str):
    given = recipe(
        kind, {"backbone": backbone}, optimizer={"kind": "adamw", "lr": 1e-3, "schedule": "cosine", "weight_decay": 0.1}
    )
    batches = [valued(make_batch(old=False, ref=False), seed=number) for number in range(6)]
    unbroken = build_critic(policy(kind), given)
    for batch in batches[:3]:
        unbroken.update(batch)
    counters, saved = unbroken.counters(), snapshot(unbroken)
    rest = [unbroken.update(batch) for batch in batches[3:]]
    resumed = build_critic(policy(kind), given)
    resumed.restore(counters, saved)
    assert resumed.counters() == counters
    assert counters["optimizer_step"] == 3
    assert [resumed.update(batch) for batch in batches[3:]] == rest
    assert resumed.tensors().keys() == saved.keys()
    assert all(torch.equal(snapshot(unbroken)[name], tensor) for name, tensor in snapshot(resumed).items())


def test_a_critic_that_never_stepped_is_restored_too():
    given = recipe("lora")
    resumed = build_critic(policy("lora"), given)
    resumed.restore(build_critic(policy("lora"), given).counters(), snapshot(build_critic(policy("lora"), given)))
    assert resumed.counters()["optimizer_step"] == 0


@pytest.mark.parametrize("saved", ["lora", "full"])
def test_the_state_of_another_critic_is_refused(saved: str):
    other = "full" if saved == "lora" else "lora"
    one, two = build_critic(policy(saved), recipe(saved)), build_critic(policy(other), recipe(other))
    before = snapshot(two)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight: .* tensors of the critic are missing, unknown or of another"
    ):
        two.restore(one.counters(), snapshot(one))
    assert all(torch.equal(before[name], tensor) for name, tensor in snapshot(two).items())
