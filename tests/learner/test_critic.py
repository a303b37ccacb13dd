"""PPO's critic: its values and gradients are those of a plain forward pass, and it shares what it may and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lockstep.config.schema import Lora, Recipe
from lockstep.errors import CheckpointError, LearnerError
from lockstep.learner.adapters import attach
from lockstep.learner.critic import TorchCritic, build_critic
from lockstep.learner.learner import TorchLearner
from lockstep.sync.fingerprint import fingerprint
from lockstep.types import Batch, LossInput, LossOutput, TrainSequence
from tests.learner.batches import Gradients, make_batch, plain_gradients
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
def policy_loss(inputs: LossInput) -> LossOutput:
    return LossOutput(-inputs.logprobs_T * inputs.advantages_T)


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


def test_a_warm_up_that_leaves_the_policy_no_step_is_refused():
    with pytest.raises(ValidationError, match=r"warmup_steps = 20 leaves the policy no step: the run has 20"):
        recipe(critic={"warmup_steps": 20})
    with pytest.raises(
        ValidationError, match=r"optimizer\.warmup_steps = 15 never ends: the run has 15 optimizer steps"
    ):
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
