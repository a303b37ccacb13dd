"""Memory that runs out in a micro-batch: forward or in the middle of the backward pass, the update is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Lora, Recipe
from lockstep.errors import LearnerError
from lockstep.learner.adapters import attach
from lockstep.learner.critic import build_critic
from lockstep.learner.learner import TorchLearner
from lockstep.types import Batch, Loss, LossInput, LossOutput
from tests.learner.batches import make_batch
from tests.learner.models import plain, twin

KINDS = ("fp64", "bf16", "lora")


def recipe(**sections: Any) -> Recipe:
    algorithm = {"kind": "grpo", "kl": {"coef": 0.3}, "entropy_coef": 0.2}
    return Recipe.model_validate({"algorithm": algorithm, "optimizer": {"kind": "adamw", "lr": 1e-3}} | sections)


LOSS: Loss = build_objective(recipe()).loss


def build(kind: str, **sections: Any) -> TorchLearner:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float64
    model: Any = twin(plain("starcoder2", dtype=dtype))
    return TorchLearner(attach(model, Lora(rank=4), seed=0) if kind == "lora" else model, recipe(**sections))


class Allocator:
    """Says that memory ran out, as often as it is told to."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, *_: object) -> None:
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines")


def build_plain() -> TorchLearner:
    return TorchLearner(twin(plain("starcoder2", dtype=torch.float64)), Recipe())


def simple(inputs: LossInput) -> LossOutput:
    return LossOutput(-inputs.logprobs_T * inputs.advantages_T)


def forward(allocator: Allocator) -> Loss:
    def loss(inputs: LossInput) -> LossOutput:
        allocator()
        return LOSS(inputs)

    return loss


def in_backward(model: nn.Module, allocator: Allocator) -> None:
    """The gradient of the second layer is done, that of the first is not."""
    layers: Any = [m for name, m in model.named_modules() if name.endswith("layers.0")]

    def hook(_: nn.Module, grads: tuple[Tensor | None, ...]) -> None:
        allocator()

    layers[0].register_full_backward_pre_hook(hook)


class NoRoomForSums(TorchDispatchMode):
    """Memory runs out once when a gradient of this shape is made fp32 for its sum."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.left = shape, 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.float32
        if wide and self.left and args[0].shape == self.shape and not torch.is_grad_enabled():
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


class NoRoomForStatistics(TorchDispatchMode):
    """Memory runs out once when a largest value is looked for after the backward pass."""

    def __init__(self, learner: TorchLearner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.learner, self.left = learner, 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.max.default and self.left and self.learner.optimizer.collected:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def result(learner: TorchLearner, loss: Loss, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    metrics = learner.update(batch, loss)
    return metrics, {name: p.detach().clone() for name, p in learner.model.named_parameters()} | {
        name: tensor.clone() for name, tensor in learner.optimizer.tensors().items()
    }


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_the_same_and_the_split_is_counted(kind: str, place: str):
    batch = make_batch(0.7)
    expected, weights = result(build(kind), LOSS, batch)
    learner, allocator = build(kind), Allocator(1)
    if place == "backward":
        in_backward(learner.model, allocator)
    found, ours = result(learner, forward(allocator) if place == "forward" else LOSS, batch)
    assert allocator.left == 0
    assert found["batch/oom_splits"] == 1
    assert (expected["batch/oom_splits"], expected["batch/microbatches"], found["batch/microbatches"]) == (0, 1, 2)
    assert found["batch/tokens_trained"] == expected["batch/tokens_trained"]
    exact = kind != "bf16"
    for name, value in expected.items():
        if not name.startswith("batch/"):
            assert found[name] == pytest.approx(value, rel=1e-9 if exact else 2e-2, abs=1e-12 if exact else 1e-3), name
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9 if exact else 5e-2, atol=1e-9 if exact else 5e-3)
    assert all(p.requires_grad for p in learner.trainable.values())
    assert all(p.grad is None for p in learner.trainable.values())


def test_a_pass_that_breaks_off_late_leaves_its_finished_gradients_as_they_are():
    """The last layer's gradient comes from the whole micro-batch, to the bit; the first layer's from the halves."""
    batch = make_batch(0.7)
    unclipped = {"kind": "adamw", "lr": 1e-3, "max_grad_norm": 1e9}  # the norm differs in its last bit, and scales all
    learner, allocator = build("fp64", optimizer=unclipped), Allocator(1)
    in_backward(learner.model, allocator)
    _, ours = result(learner, LOSS, batch)
    _, theirs = result(build("fp64", optimizer=unclipped), LOSS, batch)
    same = {name for name in ours if name.startswith("exp_avg.") and torch.equal(ours[name], theirs[name])}
    assert any("layers.1" in name for name in same)
    assert not any("layers.0" in name for name in same)


def test_no_room_for_statistics_counts_gradients_and_tokens_once():
    batch = make_batch(0.7)
    learner = build("fp64")
    with NoRoomForStatistics(learner) as mode:
        found, ours = result(learner, LOSS, batch)
    expected, theirs = result(build("fp64"), LOSS, batch)
    assert (mode.left, found["batch/oom_splits"], found["batch/microbatches"]) == (0, 1, 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name, value in expected.items():
        if not name.startswith("batch/") or name == "batch/tokens_trained":
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_no_room_for_a_gradients_fp32_sum_counts_it_once():
    """The gradient of the whole micro-batch is there, its sum is not: the halves must not be added to it."""
    batch = make_batch(0.7)
    learner = build("bf16")
    shape = next(p.shape for name, p in learner.trainable.items() if "layers.0.mlp.c_fc.weight" in name)
    expected, weights = result(build("bf16"), LOSS, batch)
    with NoRoomForSums(shape) as no_room:
        found, ours = result(learner, LOSS, batch)
    assert no_room.left == 0
    assert found["batch/oom_splits"] == 1
    assert found["grad/norm"] == pytest.approx(expected["grad/norm"], rel=2e-2)
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor, rtol=5e-2, atol=5e-3)
    assert all(p.grad is None for p in learner.trainable.values())


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_libraries_that_get_no_memory_of_the_driver(text: str):
    left = [RuntimeError(text)]

    def loss(inputs: LossInput) -> LossOutput:
        if left:
            raise left.pop()
        return LOSS(inputs)

    assert build("fp64").update(make_batch(), loss)["batch/oom_splits"] == 1


def test_halves_are_of_tokens():
    """One long sequence and seven short ones, on a device that has room for the long one and little more."""
    short, long = make_batch().sequences[0], 40
    lists = (True,) * long, (-1.0,) * long, (0.5,) * long
    first = replace(short, ids=tuple(3 + i % 20 for i in range(long)), trained=lists[0], rollout_logprobs=lists[1],
                    advantages=lists[2], old_logprobs=None, ref_logprobs=None, group=0)  # fmt: skip
    plain = replace(short, old_logprobs=None, ref_logprobs=None)
    batch = Batch((first, *(replace(plain, group=group) for group in range(1, 8))))
    learner, tokens = build_plain(), list[int]()

    def room(module: nn.Module, args: Any, keywords: Any) -> None:
        tokens.append(keywords["input_ids"].shape[1])
        if tokens[-1] > 48:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    learner.model.get_decoder().register_forward_pre_hook(room, with_kwargs=True)  # type: ignore[operator, union-attr]
    metrics = learner.update(batch, simple)
    assert metrics["batch/oom_splits"] == 1
    assert len(tokens) == 3
    assert max(tokens[1:]) <= 48 < tokens[0]


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_critic_on_the_same_states_counts_its_tokens_once(place: str):
    critic_recipe = recipe(algorithm={"kind": "ppo", "critic": {"backbone": "shared"}})
    batch = with_returns(make_batch(0.7))
    results = []
    for times in (0, 1):
        model, allocator = twin(plain("starcoder2", dtype=torch.float64)), Allocator(times)
        critic = build_critic(model, critic_recipe)
        learner = TorchLearner(model, critic_recipe, value=critic.joint)
        if place == "backward":
            in_backward(model, allocator)
        metrics, _ = result(learner, forward(allocator) if place == "forward" else LOSS, batch)
        results.append((metrics, {name: tensor.clone() for name, tensor in critic.tensors().items()}))
    (expected, theirs), (found, ours) = results
    assert found["batch/oom_splits"] == 1
    for name in ("critic/loss", "critic/value_mean", "critic/grad_norm", "critic/explained_variance", "grad/norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9), name
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-12)


def with_returns(batch: Batch) -> Batch:
    sequences = tuple(
        replace(s, values=(0.0,) * len(s.ids), returns=tuple(0.1 * i + s.group for i in range(len(s.ids))))
        for s in batch.sequences
    )
    return replace(batch, sequences=sequences)


def test_a_half_that_does_not_fit_is_an_error_with_advice():
    learner, batch = build("fp64"), make_batch()
    with pytest.raises(LearnerError, match="ran out in a micro-batch of") as caught:
        learner.update(batch, forward(Allocator(2)))
    # 33 tokens in three groups, 53 in the fourth: parted anywhere else, one half would be larger
    assert "of 33 tokens, 6 sequences: CUDA out of memory" in caught.value.what
    assert "more lines" not in caught.value.what
    assert "update.tokens_per_microbatch" in caught.value.fix
    assert all(p.requires_grad for p in learner.trainable.values())


def test_one_sequence_cannot_be_halved():
    learner = build("fp64")
    batch = make_batch()
    one = Batch(batch.sequences[:1], batch.temperature, kl_coef=batch.kl_coef)
    with pytest.raises(LearnerError, match="of 5 tokens, 1 sequences"):
        learner.update(one, forward(Allocator(1)))


def test_other_errors_are_nobodys_business():
    def broken(inputs: LossInput) -> LossOutput:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        build("fp64").update(make_batch(), broken)


def once_in_forward(module: Any, times: int = 1) -> Allocator:
    """Memory runs out when the decoder begins, so often."""
    allocator = Allocator(times)
    module.register_forward_pre_hook(lambda *_: allocator())
    return allocator


@pytest.mark.parametrize("kind", ["responses", "reference", "plain"])
def test_scoring_in_halves_gives_the_same_numbers(kind: str, caplog: pytest.LogCaptureFixture):
    learner, batch = build("lora"), make_batch(old=False, ref=False)

    def score() -> Any:
        if kind == "plain":
            return learner.logprobs([(*s.prompt_ids, *s.ids) for s in batch.sequences])
        return learner.response_logprobs(batch.sequences, 0.7, reference=kind == "reference")

    expected = score()
    allocator = once_in_forward(learner.model.get_base_model().get_decoder())  # type: ignore[operator]
    found = score()
    assert allocator.left == 0
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)
    assert "tokens together (CUDA out of memory. Tried to allocate 20.00 GiB.): done in two halves" in caplog.text


def test_values_in_halves_are_the_same():
    critic = build_critic(
        twin(plain("starcoder2", dtype=torch.float64)), recipe(algorithm={"kind": "ppo", "critic": {"backbone": "own"}})
    )
    batch = make_batch(old=False, ref=False)
    expected = critic.values(batch.sequences)
    allocator = once_in_forward(critic.decoder)
    found = critic.values(batch.sequences)
    assert allocator.left == 0
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("times", "count"), [(1, 1), (2, 8)])
def test_what_does_not_fit_in_halves_says_what_to_change(times: int, count: int):
    """One sequence cannot be halved, and a half is not halved again."""
    learner, batch = build_plain(), make_batch(old=False, ref=False)
    once_in_forward(learner.model.get_decoder(), times)  # type: ignore[operator]
    with pytest.raises(LearnerError, match=r"ran out in a micro-batch of \d+ tokens") as raised:
        learner.response_logprobs(batch.sequences[:count], 1.0)
    assert raised.value.where == "scoring"
    assert raised.value.fix == "lower update.tokens_per_microbatch, or free memory of the GPU"


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_an_optimizer_that_finds_no_memory_says_what_to_change(part: str, monkeypatch: pytest.MonkeyPatch):
    critic_recipe = recipe(algorithm={"kind": "ppo", "critic": {"backbone": "shared"}})
    model = twin(plain("starcoder2", dtype=torch.float64))
    critic = build_critic(model, critic_recipe)
    learner = TorchLearner(model, critic_recipe, value=critic.joint)
    assert critic.joint is not None
    optimizer: Any = learner.optimizer if part == "policy" else critic.joint.optimizer
    monkeypatch.setattr(optimizer._inner[0].optimizer, "step", Allocator(1))
    with pytest.raises(LearnerError, match="ran out in the optimizer's step: CUDA out of memory") as raised:
        learner.update(with_returns(make_batch(0.7)), LOSS)
    assert raised.value.where == ("optimizer step 0" if part == "policy" else "optimizer step 0 of the critic")
    assert "resume from the last checkpoint" in raised.value.fix
