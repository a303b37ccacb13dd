"""Updates: what is skipped, counted, restored and compared with the reference model."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Lora, Recipe
from lockstep.errors import LearnerError
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.types import Batch, LossInput, LossOutput
from tests.learner.batches import make_batch, plain_inputs
from tests.learner.models import logprobs_of, plain, tokens, twin

KINDS = ("fp32", "bf16", "lora")


def recipe(kind: str = "fp32", **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2}
    }
    if kind == "lora":
        settings["adapter"] = {"kind": "lora", "rank": 4}
    return Recipe.model_validate(settings | {"steps": 20} | sections)


def build(kind: str, given: Recipe | None = None) -> TorchLearner:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    model: Any = twin(plain("llama-tied", dtype=dtype))
    if kind == "lora":
        model = attach(model, Lora(rank=4), seed=0)
    return TorchLearner(model, given or recipe(kind))


def snapshot(learner: TorchLearner) -> dict[str, Tensor]:
    """Every weight and the whole optimizer state, copied."""
    weights = {f"weight.{name}": p for name, p in learner.model.named_parameters()}
    return {name: t.detach().clone() for name, t in (weights | learner.optimizer.tensors()).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def gradient_step(learner: TorchLearner, number: int = 0) -> dict[str, float]:
    """One update, another at each number."""
    batch = make_batch(old=False, ref=False)
    turned = batch.sequences[number % 5 :] + batch.sequences[: number % 5 + 1]
    return learner.update(Batch(turned), policy_loss)


def policy_loss(inputs: LossInput) -> LossOutput:
    return LossOutput(-inputs.logprobs_T * inputs.advantages_T)


def poisoned(value: float) -> Any:
    """A loss of which one token of one micro-batch is not finite."""

    def loss(inputs: LossInput) -> LossOutput:
        factor_T = torch.ones_like(inputs.logprobs_T)
        if inputs.sequences >= 2:
            factor_T[-1] = value
        return LossOutput(-inputs.logprobs_T * inputs.advantages_T * factor_T)

    return loss


# --- updates --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_the_probability_of_what_has_advantage(kind: str):
    batch = make_batch(masked=False, old=False, ref=False)
    signs = [1.0 if i % 2 else -1.0 for i in range(len(batch.sequences))]
    signed = [
        replace(s, advantages=(sign,) * len(s.ids), weight=0.1) for s, sign in zip(batch.sequences, signs, strict=True)
    ]
    learner = build(kind, recipe(kind, optimizer={"kind": "adamw", "lr": 3e-3}))
    before = learner.response_logprobs(signed, 1.0)
    for _ in range(5):
        learner.update(Batch(tuple(signed)), policy_loss)
    after = learner.response_logprobs(signed, 1.0)
    gained = [sign * (sum(b) - sum(a)) for sign, a, b in zip(signs, before, after, strict=True)]
    assert sum(gained) > 5
    assert sum(g > 0 for g in gained) >= 9
    assert learner.version == learner.optimizer_step == 5


def test_an_update_reports_what_it_did():
    learner = build("fp32")
    batch = make_batch(0.8, old=False, ref=False)
    metrics = learner.update(batch, build_objective(Recipe()).loss)
    inputs = [plain_inputs(plain("llama-tied"), s, 0.8) for s in batch.sequences]
    gap_T = torch.cat([i.logprobs_T.detach() - i.rollout_logprobs_T for i in inputs])
    entropy_T = torch.cat([i.entropy_T.detach() for i in inputs])
    expected = {
        "mismatch/mean_abs_dlogp": gap_T.abs().mean(),
        "mismatch/max_abs_dlogp": gap_T.abs().max(),
        "mismatch/k1": -gap_T.mean(),
        "mismatch/k3": (gap_T.exp() - 1 - gap_T).mean(),
        "mismatch/token_mult_prob_error": gap_T.abs().exp().mean(),
        "entropy/mean": entropy_T.mean(),
        "entropy/p10": entropy_T.quantile(0.1),
        "entropy/p90": entropy_T.quantile(0.9),
        "ratio/max": torch.tensor(1.0),
        "ratio/clip_share": torch.tensor(0.0),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-3), name
    assert metrics["lr"] == pytest.approx(0.5e-3), "the first of two warm-up steps"
    assert metrics["grad/skipped"] == 0
    assert gradient_step(learner)["lr"] == pytest.approx(1e-3)


def test_the_ratio_is_taken_to_the_old_policy():
    batch = make_batch(old=False, ref=False)
    learner = build("fp32", recipe(optimizer={"kind": "adamw", "lr": 1e-2}))
    old = learner.response_logprobs(batch.sequences, 1.0)
    fixed = Batch(tuple(replace(s, old_logprobs=row) for s, row in zip(batch.sequences, old, strict=True)))
    loss = build_objective(Recipe()).loss
    first = learner.update(fixed, loss)
    second = learner.update(fixed, loss)
    assert first["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    now = learner.response_logprobs(batch.sequences, 1.0)
    assert second["ratio/max"] > 1.01
    assert max(abs(a - b) for x, y in zip(old, now, strict=True) for a, b in zip(x, y, strict=True)) > 0.01


def test_response_logprobs_are_those_of_trained_tokens():
    batch = make_batch()
    found = build("fp32").response_logprobs(batch.sequences, 0.7)
    for sequence, values in zip(batch.sequences, found, strict=True):
        whole = logprobs_of(plain("llama-tied"), (*sequence.prompt_ids, *sequence.ids), 0.7)
        expected = whole[len(sequence.prompt_ids) - 1 :].tolist()
        assert len(values) == len(sequence.ids)
        for value, wanted, trained in zip(values, expected, sequence.trained, strict=True):
            assert value == (pytest.approx(wanted, abs=1e-5) if trained else 0.0)


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(LearnerError, match="no parameter of the model is trained"):
        TorchLearner(twin(plain("llama")).requires_grad_(False), recipe())


# --- non-finite gradients -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_step_changes_no_bit_and_is_counted(kind: str, value: float):
    learner = build(kind)
    gradient_step(learner)
    before = snapshot(learner)
    metrics = learner.update(make_batch(old=False, ref=False), poisoned(value))
    assert same(before, snapshot(learner))
    assert metrics["grad/skipped"] == learner.skipped == 1
    assert not math.isfinite(metrics["grad/norm"])
    assert learner.version == learner.optimizer_step == 2, "the step was taken, though it did nothing"

    clean = build(kind)
    gradient_step(clean)
    clean.optimizer_step, clean.version = 2, 2
    assert gradient_step(learner, 1)["grad/skipped"] == 1
    gradient_step(clean, 1)
    assert same(snapshot(clean), snapshot(learner)), "nothing of the bad gradient is left"


def test_one_bad_micro_batch_is_enough():
    learner = build("fp32", recipe(update={"tokens_per_microbatch": 25}))
    before = snapshot(learner)
    metrics = learner.update(make_batch(old=False, ref=False), poisoned(math.nan))
    assert metrics["batch/microbatches"] > 3
    assert metrics["grad/skipped"] == 1
    assert same(before, snapshot(learner))


def test_too_many_bad_steps_in_a_row_stop():
    learner = build("fp32", recipe(update={"max_skipped": 3}))
    bad, batch = poisoned(math.inf), make_batch(old=False, ref=False)
    learner.update(batch, bad)
    learner.update(batch, bad)
    gradient_step(learner)  # a good one: the row starts anew
    before = snapshot(learner)
    learner.update(batch, bad)
    learner.update(batch, bad)
    with pytest.raises(LearnerError, match="3 steps in a row were skipped") as caught:
        learner.update(batch, bad)
    assert "optimizer step 6" in str(caught.value)
    assert learner.skipped == 5
    assert same(before, snapshot(learner))


def test_the_row_of_bad_steps_is_saved_and_restored():
    learner, batch = build("fp32"), make_batch(old=False, ref=False)
    learner.update(batch, poisoned(math.nan))
    learner.update(batch, poisoned(math.nan))
    resumed = build("fp32")
    resumed.restore(learner.save().counters, learner.optimizer.tensors())
    with pytest.raises(LearnerError, match="3 steps in a row"):
        resumed.update(batch, poisoned(math.nan))


# --- state ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_saved_and_three_more_are_six(kind: str):
    unbroken = build(kind)
    for number in range(3):
        gradient_step(unbroken, number)
    saved = {name: t.clone() for name, t in unbroken.optimizer.tensors().items()}
    weights = {name: p.detach().clone() for name, p in unbroken.model.named_parameters()}
    counters = unbroken.save().counters
    rates = [gradient_step(unbroken, number)["lr"] for number in range(3, 6)]

    resumed = build(kind)
    with torch.no_grad():
        for name, parameter in resumed.model.named_parameters():
            parameter.copy_(weights[name])
    resumed.restore(counters, saved)
    assert resumed.save().counters == counters
    assert counters["optimizer_step"] == 3
    assert [gradient_step(resumed, number)["lr"] for number in range(3, 6)] == rates
    assert same(snapshot(unbroken), snapshot(resumed))
    assert resumed.save().counters == unbroken.save().counters


# --- reference ------------------------------------------------------------------------------------------------------
def test_with_adapters_the_reference_is_the_base():
    learner, batch = (
        build("lora", recipe("lora", optimizer={"kind": "adamw", "lr": 1e-2})),
        make_batch(old=False, ref=False),
    )
    base = twin(plain("llama-tied"))
    expected = TorchLearner(base, recipe()).response_logprobs(batch.sequences, 0.9)
    trained = {name: p.requires_grad for name, p in learner.model.named_parameters()}
    for number in range(3):
        gradient_step(learner, number)
    now = learner.response_logprobs(batch.sequences, 0.9)
    found = learner.response_logprobs(batch.sequences, 0.9, reference=True)
    assert largest(found, expected) == 0
    assert largest(now, expected) > 0.05
    assert {name: p.requires_grad for name, p in learner.model.named_parameters()} == trained
    assert largest(learner.response_logprobs(batch.sequences, 0.9), now) == 0, "the adapters are on again"


def test_in_full_training_the_reference_is_the_frozen_copy():
    model, batch = twin(plain("llama-tied")), make_batch(old=False, ref=False)
    frozen = copy.deepcopy(model).requires_grad_(False)
    learner = TorchLearner(model, recipe(optimizer={"kind": "adamw", "lr": 1e-2}), frozen)
    before = learner.response_logprobs(batch.sequences, 1.0)
    for number in range(3):
        gradient_step(learner, number)
    found = learner.response_logprobs(batch.sequences, 1.0, reference=True)
    assert largest(found, before) == 0
    assert largest(learner.response_logprobs(batch.sequences, 1.0), before) > 0.05


def test_without_a_reference_it_is_said():
    with pytest.raises(LearnerError, match="needs a reference model, but there is none"):
        build("fp32").response_logprobs(make_batch().sequences, 1.0, reference=True)


@pytest.mark.parametrize("kind", ["fp32", "lora"])
def test_the_penalty_holds_the_policy_near_its_reference(kind: str):
    """End to end: the same updates with and without KL; with it the policy drifts less, and the reported KL is the true one."""

    def drift(coef: float) -> tuple[float, dict[str, float]]:
        given = recipe(kind, algorithm={"kind": "grpo", "kl": {"coef": coef}}, optimizer={"kind": "adamw", "lr": 3e-3})
        objective = build_objective(given)
        assert objective.needs_reference == (coef > 0)
        learner = build(kind, given)
        if kind == "fp32":
            learner = TorchLearner(learner.model, given, copy.deepcopy(learner.model).requires_grad_(False))
        batch = make_batch(masked=False, old=False, ref=False)
        sequences = list(batch.sequences)
        reference = learner.response_logprobs(sequences, 1.0, reference=True)
        metrics: dict[str, float] = {}
        for _ in range(6):
            now = learner.response_logprobs(sequences, 1.0)
            again = learner.response_logprobs(sequences, 1.0, reference=True)
            compared = [replace(s, ref_logprobs=row) for s, row in zip(sequences, again, strict=True)]
            ready = compared if coef else sequences
            metrics = learner.update(Batch(tuple(ready), kl_coef=coef), objective.loss)
        if coef:
            gaps = [a - b for x, y in zip(now, reference, strict=True) for a, b in zip(x, y, strict=True)]
            k3 = sum(math.exp(-g) - 1 + g for g in gaps) / len(gaps)
            assert metrics["kl/ref"] == pytest.approx(k3, rel=1e-2)
            assert metrics["loss/kl"] == pytest.approx(coef * metrics["kl/ref"], rel=1e-6)
        else:
            assert "kl/ref" not in metrics
        return largest(learner.response_logprobs(sequences, 1.0), reference), metrics

    assert drift(5.0)[0] < 0.7 * drift(0.0)[0]


def largest(one: list[tuple[float, ...]], other: list[tuple[float, ...]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_weights_are_a_stream_of_the_models_tensors():
    learner = build("fp32")
    ids = tokens(9, 1)
    other: nn.Module = twin(plain("llama-tied", seed=1))
    parameters = dict(other.named_parameters())
    with torch.no_grad():
        for name, tensor in learner.weights():
            parameters[name].copy_(tensor)
    assert TorchLearner(other, recipe()).logprobs([ids]) == learner.logprobs([ids])


def test_gradients_of_an_update_that_failed_are_not_in_the_next() -> None:
    recipe = Recipe.model_validate(
        {"update": {"tokens_per_microbatch": 40}, "optimizer": {"kind": "adamw", "lr": 1e-3}}
    )
    fresh, other = (TorchLearner(twin(plain("llama")), recipe) for _ in range(2))
    calls = 0

    def good(inputs: LossInput) -> LossOutput:
        return LossOutput(-inputs.logprobs_T * inputs.advantages_T)

    def failing(inputs: LossInput) -> LossOutput:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("a user's loss fails")
        return good(inputs)

    with pytest.raises(ValueError, match="a user's loss fails"):
        other.update(make_batch(), failing)
    assert other.update(make_batch(), good)["grad/norm"] == fresh.update(make_batch(), good)["grad/norm"]
