"""Packing, shared prompts and the head without a matrix change nothing: gradients are those of plain autograd."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Lora, Recipe
from lockstep.errors import LearnerError
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.types import Batch, Loss, LossInput, LossOutput, TrainSequence
from tests.learner.batches import learner_gradients, make_batch, plain_gradients, plain_inputs
from tests.learner.models import plain, tokens, twin, wide


def recipe(**update: object) -> Recipe:
    """Everything that a GRPO loss can hold: ratio, KL penalty, entropy bonus."""
    algorithm = {"kind": "grpo", "kl": {"coef": 0.3}, "entropy_coef": 0.2}
    return Recipe.model_validate({"algorithm": algorithm, "update": update, "optimizer": {"kind": "adamw", "lr": 0.0}})


LOSS: Loss = build_objective(recipe()).loss


@cache
def expected(family: str, temperature: float) -> tuple[float, dict[str, Tensor]]:
    return plain_gradients(wide(family), make_batch(temperature), LOSS)


def closest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference between gradients, relative to the largest gradient of the tensor."""
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].abs().max() > 0 for name in theirs), "every parameter should matter"
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in ours)


WIDE = ("llama", "llama-tied", "starcoder2", "phi")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", WIDE)
def test_every_gradient_is_that_of_plain_autograd(family: str, temperature: float):
    metrics, ours = learner_gradients(twin(wide(family)), make_batch(temperature), LOSS, recipe())
    loss, theirs = expected(family, temperature)
    assert closest(ours, theirs) < 1e-12
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-10)
    norm = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    assert metrics["grad/norm"] == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 24, 60, 10_000])
def test_the_split_and_the_sharing_change_nothing(budget: int, share: bool):
    given = recipe(tokens_per_microbatch=budget, share_prompts=share)
    metrics, ours = learner_gradients(twin(wide("llama-tied")), make_batch(0.7), LOSS, given)
    loss, theirs = expected("llama-tied", 0.7)
    assert closest(ours, theirs) < 1e-12
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-10)
    batch = make_batch()
    alone = sum(len(s.prompt_ids) + len(s.ids) - 1 for s in batch.sequences)
    prompts = {s.group: len(s.prompt_ids) for s in batch.sequences}
    together = sum(prompts.values()) + sum(len(s.ids) - 1 for s in batch.sequences)
    processed = {(1, True): alone, (10_000, True): together}.get((budget, share), None if share else alone)
    if processed is not None:
        assert metrics["batch/tokens_processed"] == processed
    microbatches = {1: len(batch.sequences), 10_000: 1}.get(budget)
    if microbatches is not None:
        assert metrics["batch/microbatches"] == microbatches


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 50, 10_000])
@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_a_beginning_that_all_share_changes_nothing(family: str, budget: int, share: bool):
    """Eleven tokens before every prompt, processed once per micro-batch: longer than Starcoder's window here."""
    plain_batch, begins = make_batch(0.7), tokens(11, 5)
    longer = tuple(replace(s, prompt_ids=(*begins, *s.prompt_ids)) for s in plain_batch.sequences)
    given = recipe(tokens_per_microbatch=budget, share_prompts=share)
    metrics, ours = learner_gradients(
        twin(wide(family)), replace(plain_batch, sequences=longer, prefix=11), LOSS, given
    )
    _, theirs = plain_gradients(wide(family), replace(plain_batch, sequences=longer), LOSS)
    assert closest(ours, theirs) < 1e-12
    if budget == 10_000:
        groups = len({s.group for s in longer})
        apart, _ = learner_gradients(twin(wide(family)), replace(plain_batch, sequences=longer), LOSS, given)
        saved = 11 * (groups - 1) if share else 0
        assert metrics["batch/tokens_processed"] == apart["batch/tokens_processed"] - saved


def test_a_beginning_that_not_all_share_is_refused():
    mixed = make_batch().sequences[-4:] + make_batch().sequences[:3]
    with pytest.raises(LearnerError, match="does not begin with the 3 tokens that all sequences should share"):
        learner_gradients(twin(wide("llama")), Batch(mixed, prefix=3), LOSS, recipe())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-oss", "mistral", "granite"])
def test_gradients_of_other_families_in_fp32(family: str):
    """Softcaps, sinks and windows too; a plain implementation in the same precision is as far from the truth."""
    reference = plain(family)
    _, theirs = plain_gradients(reference, make_batch(0.9), LOSS)
    _, ours = learner_gradients(twin(plain(family)), make_batch(0.9), LOSS, recipe(tokens_per_microbatch=60))
    assert closest(ours, {name: grad.double() for name, grad in theirs.items()}) < 1e-5


def test_logprobs_and_entropy_of_each_token():
    batch = make_batch(0.7)
    reference = wide("llama")
    seen: list[LossInput] = []

    def spy(inputs: LossInput) -> LossOutput:
        seen.append(inputs)
        return LOSS(inputs)

    learner_gradients(twin(wide("llama")), batch, spy, recipe())
    (inputs,) = seen
    place = 0
    for number, sequence in enumerate(batch.sequences):
        one = plain_inputs(reference, sequence, 0.7)
        span = slice(place, place + one.logprobs_T.numel())
        place = span.stop
        for field in (
            "logprobs_T",
            "entropy_T",
            "old_logprobs_T",
            "rollout_logprobs_T",
            "advantages_T",
            "ref_logprobs_T",
        ):
            torch.testing.assert_close(getattr(inputs, field)[span], getattr(one, field), rtol=1e-9, atol=1e-9)
        assert (inputs.sequence_T[span] == number).all()
    assert inputs.logprobs_T.numel() == place
    assert inputs.sequences == len(batch.sequences)


def test_untrained_tokens_carry_no_loss_but_are_seen():
    batch = make_batch()

    def changed(sequence: TrainSequence, ids: bool) -> TrainSequence:
        """Other numbers, or other ids, where nothing is trained."""
        other = tokens(len(sequence.ids), 999)

        def swap(values: Any, new: Any) -> Any:
            return tuple(v if t else n for v, n, t in zip(values, new, sequence.trained, strict=True))

        junk = (123.0,) * len(sequence.ids)
        if ids:
            return replace(sequence, ids=swap(sequence.ids, other))
        return replace(
            sequence,
            advantages=swap(sequence.advantages, junk),
            rollout_logprobs=swap(sequence.rollout_logprobs, junk),
            old_logprobs=swap(sequence.old_logprobs, junk),
            ref_logprobs=swap(sequence.ref_logprobs, junk),
        )

    numbers = replace(batch, sequences=tuple(changed(s, False) for s in batch.sequences))
    context = replace(batch, sequences=tuple(changed(s, True) for s in batch.sequences))
    assert numbers != batch
    metrics, ours = learner_gradients(twin(wide("llama")), batch, LOSS, recipe())
    _, same = learner_gradients(twin(wide("llama")), numbers, LOSS, recipe())
    _, other = learner_gradients(twin(wide("llama")), context, LOSS, recipe())
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    assert closest(other, ours) > 1e-3
    assert metrics["batch/tokens_trained"] == sum(sum(s.trained) for s in batch.sequences)


def test_sequences_without_a_trained_token_change_nothing():
    batch = make_batch()
    silent = tuple(replace(s, trained=(False,) * len(s.ids), group=50 + i) for i, s in enumerate(batch.sequences[:3]))
    _, ours = learner_gradients(twin(wide("llama")), batch, LOSS, recipe())
    for budget in (1, 10_000):
        given = recipe(tokens_per_microbatch=budget)
        metrics, more = learner_gradients(
            twin(wide("llama")), replace(batch, sequences=(*silent, *batch.sequences)), LOSS, given
        )
        assert closest(more, ours) < 1e-12
        assert metrics["batch/tokens_trained"] == sum(sum(s.trained) for s in batch.sequences)


def test_leaving_out_what_has_no_gradient_is_exact():
    """GRPO without KL and entropy: sequences of advantage 0 may be dropped."""
    objective = build_objective(Recipe())
    assert objective.zero_advantage_is_zero_gradient
    batch = make_batch(old=False, ref=False)
    zeroed = [replace(s, advantages=(0.0,) * len(s.ids)) if i % 2 else s for i, s in enumerate(batch.sequences)]
    _, all_of_them = learner_gradients(twin(wide("llama")), Batch(tuple(zeroed)), objective.loss, Recipe())
    _, rest = learner_gradients(twin(wide("llama")), Batch(tuple(zeroed[::2])), objective.loss, Recipe())
    assert closest(rest, all_of_them) < 1e-12


def test_adapters_get_the_gradients_of_the_product():
    """d/dA and d/dB of W + s·B·A by plain autograd on the merged weight."""
    target, rank, alpha = "q_proj", 3, 6.0
    reference = wide("llama")
    adapter = Lora(rank=rank, alpha=alpha, targets=[target])
    model = attach(twin(wide("llama")), adapter, seed=3)  # type: ignore[arg-type]
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float64 for p in factors.values())
    for number, parameter in enumerate(factors.values()):
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    merged = {}
    for name, parameter in reference.named_parameters():
        if target in name and name.endswith(".weight"):
            stem = "base_model.model." + name.removesuffix(".weight")
            a, b = factors[f"{stem}.lora_A.default.weight"], factors[f"{stem}.lora_B.default.weight"]
            parameter.data += alpha / rank * (b @ a).detach()
            merged[stem] = name
    _, whole = plain_gradients(reference, make_batch(0.7), LOSS)
    _, ours = learner_gradients(model, make_batch(0.7), LOSS, recipe(tokens_per_microbatch=40))
    assert len(merged) == 2
    assert ours.keys() == factors.keys()
    for stem, name in merged.items():
        a, b = factors[f"{stem}.lora_A.default.weight"].detach(), factors[f"{stem}.lora_B.default.weight"].detach()
        scale = alpha / rank
        torch.testing.assert_close(
            ours[f"{stem}.lora_A.default.weight"], scale * b.T @ whole[name], rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(
            ours[f"{stem}.lora_B.default.weight"], scale * whole[name] @ a.T, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_activations_give_the_same_gradients_and_cost_a_second_pass(lora: bool):
    def build() -> nn.Module:
        model = twin(wide("llama"))
        return attach(model, Lora(rank=4), seed=0) if lora else model  # type: ignore[arg-type]

    passes = {}
    gradients = {}
    for recompute in ("none", "full"):
        model = build()
        counted: list[int] = []
        layer = next(m for m in model.modules() if type(m).__name__ == "LlamaMLP")
        layer.register_forward_pre_hook(partial(_note, counted))
        _, gradients[recompute] = learner_gradients(model, make_batch(), LOSS, recipe(recompute=recompute))
        passes[recompute] = len(counted)
    assert passes == {"none": 1, "full": 2}
    assert all(torch.equal(gradients["none"][name], gradients["full"][name]) for name in gradients["full"])


def _note(counted: list[int], *_: object) -> None:
    counted.append(1)


def test_scoring_without_loss_needs_no_gradients_and_no_responses():
    model = twin(wide("llama"))
    learner = TorchLearner(model, recipe())
    before = copy.deepcopy(model.state_dict())
    one, two, many = learner.logprobs([(5,), (5, 6), tokens(40, 1)])
    assert one == ()
    assert len(two) == 1
    assert len(many) == 39
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
