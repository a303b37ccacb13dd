"""AdamW with fp32 masters, its schedules, clipping, refusal of non-finite gradients, and its state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.schema import AdamW
from lockstep.errors import CheckpointError
from lockstep.learner.optimizer import MasterOptimizer
from lockstep.learner.schedule import learning_rate


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (4, 3), "vector": (5,), "other": (2, 2)}
    return {name: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def loss_of(given: dict[str, nn.Parameter], number: int) -> Tensor:
    """Another function at each step."""
    total = torch.zeros(())
    for place, parameter in enumerate(given.values()):
        target = torch.linspace(-2, 2 + number, parameter.numel()).view_as(parameter)
        total = total + ((parameter.float() - target) ** 2).sum() * (1 + place)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_parameters_are_trained_as_by_torchs_adamw(dtype: torch.dtype):
    settings = AdamW(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, max_grad_norm=1e9)
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = MasterOptimizer(ours, settings)
    matrices = [p for p in theirs.values() if p.dim() == 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": [theirs["vector"]], "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-6,
        foreach=False,
    )
    for step in range(6):
        rate = 0.1 / (1 + step)
        loss_of(ours, step).backward()
        norm = optimizer.step(rate).norm
        loss_of(theirs, step).backward()
        grads = [p.grad for p in theirs.values() if p.grad is not None]
        assert norm == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-6)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        reference.zero_grad()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_decay_is_for_matrices_only():
    given = parameters()
    before = {name: p.detach().clone() for name, p in given.items()}
    MasterOptimizer(given, AdamW(weight_decay=0.5)).step(0.1)  # no gradient: only the decay moves anything
    torch.testing.assert_close(given["matrix"].detach(), before["matrix"] * (1 - 0.1 * 0.5))
    assert torch.equal(given["vector"].detach(), before["vector"])


def test_a_small_step_is_not_lost_to_rounding():
    """bf16 numbers near 0.01 are 6e-5 apart. Steps of 1e-6 move the master at once and the weight after some thirty."""
    weight = nn.Parameter(torch.tensor([[0.0101]], dtype=torch.bfloat16))
    start = weight.item()
    optimizer = MasterOptimizer({"w": weight}, AdamW())
    moved = []
    for step in range(1, 61):
        (weight.float() * 3.0).sum().backward()
        optimizer.step(1e-6)
        master = float(optimizer.tensors()["master.w"])
        assert master == pytest.approx(start - step * 1e-6, abs=2e-8)
        assert weight.item() == float(torch.tensor(master).bfloat16()), "the weight is the rounded master"
        moved.append(weight.item() != start)
    assert not any(moved[:20])
    assert all(moved[40:])


def test_gradients_of_microbatches_are_summed_in_fp32():
    """256 gradients of 2^-9 beside one of 1: a sum in bf16 would stay at 1."""
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    optimizer = MasterOptimizer({"w": weight}, AdamW(max_grad_norm=1e9))
    (weight.float() * 1.0).sum().backward()
    for _ in range(256):
        (weight.float() * 2**-9).sum().backward()
    assert weight.grad is None, "the narrow gradient is given back at once"
    assert optimizer.step(0.0).norm == 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_scales_all_gradients_to_the_limit(dtype: torch.dtype):
    given = {"a": nn.Parameter(torch.zeros(1, 1, dtype=dtype)), "b": nn.Parameter(torch.zeros(1, dtype=dtype))}
    optimizer = MasterOptimizer(given, AdamW(betas=(0.5, 0.5), max_grad_norm=1.0))
    (given["a"].float().sum() * 3 - given["b"].float().sum() * 4).backward()
    result = optimizer.step(0.0)
    assert (result.norm, result.clipped, result.skipped) == (pytest.approx(5.0), True, False)
    state = optimizer.tensors()  # the first moment after one step is half the gradient that was applied
    assert float(state["exp_avg.a"]) == pytest.approx(0.3, rel=1e-5)
    assert float(state["exp_avg.b"]) == pytest.approx(-0.4, rel=1e-5)
    (given["a"].float().sum() * 0.3 - given["b"].float().sum() * 0.4).backward()
    result = optimizer.step(0.0)
    assert (result.norm, result.clipped) == (pytest.approx(0.5, rel=1e-2), False)
    assert float(optimizer.tensors()["exp_avg.a"]) == pytest.approx(0.5 * 0.3 + 0.5 * 0.3, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, value: float):
    given = parameters(dtype)
    optimizer = MasterOptimizer(given, AdamW(weight_decay=0.1))
    loss_of(given, 0).backward()
    optimizer.step(0.01)
    before = {name: t.clone() for name, t in (optimizer.tensors() | dict(given)).items()}
    loss_of(given, 1).backward()
    (given["vector"][2] * value).backward()
    result = optimizer.step(0.01)
    assert result.skipped
    assert not result.clipped
    after = optimizer.tensors() | dict(given)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loss_of(given, 1).backward()
    assert not optimizer.step(0.01).skipped, "the bad gradient is gone"


# --- schedules ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (AdamW(), {0: 1.0, 5: 1.0, 11: 1.0}),
        (AdamW(warmup_steps=4), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 11: 1.0}),
        (AdamW(schedule="linear"), {0: 1.0, 3: 0.75, 6: 0.5, 9: 0.25, 11: 1 / 12, 12: 0.0, 99: 0.0}),
        (AdamW(schedule="linear", min_lr_ratio=0.2), {0: 1.0, 6: 0.6, 12: 0.2}),
        (AdamW(schedule="linear", warmup_steps=4), {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.75, 8: 0.5, 11: 0.125}),
        (AdamW(schedule="cosine"), {0: 1.0, 3: (1 + math.sqrt(0.5)) / 2, 4: 0.75, 6: 0.5, 8: 0.25, 12: 0.0}),
        (AdamW(schedule="cosine", min_lr_ratio=0.1, warmup_steps=2), {0: 0.5, 1: 1.0, 2: 1.0, 7: 0.55, 12: 0.1}),
    ],
    ids=str,
)
def test_schedules_by_hand(settings: AdamW, expected: dict[int, float]):
    """Of twelve steps with a peak of 2e-5."""
    for step, share in expected.items():
        assert learning_rate(settings, 2e-5, step, 12) == pytest.approx(share * 2e-5, abs=1e-15)


def test_a_rate_of_zero_changes_no_weight():
    given = parameters()
    before = {name: p.detach().clone() for name, p in given.items()}
    optimizer = MasterOptimizer(given, AdamW(weight_decay=0.1))
    for step in range(3):
        loss_of(given, step).backward()
        optimizer.step(0.0)
    assert all(torch.equal(before[name], given[name].detach()) for name in given)


# --- state ----------------------------------------------------------------------------------------------------------
def test_the_state_of_no_step_can_be_restored():
    for dtype in (torch.float32, torch.bfloat16):
        fresh = MasterOptimizer(parameters(dtype), AdamW())
        MasterOptimizer(parameters(dtype), AdamW()).restore(fresh.tensors())


@pytest.mark.parametrize("damage", ["unknown", "missing moment", "missing master", "missing parameter", "shape"])
def test_a_state_of_other_parameters_is_refused_and_changes_nothing(damage: str):
    given = parameters(torch.bfloat16)
    optimizer = MasterOptimizer(given, AdamW())
    loss_of(given, 0).backward()
    optimizer.step(0.1)
    state = {name: t.clone() for name, t in optimizer.tensors().items()}
    match damage:
        case "unknown":
            state["exp_avg.stranger"] = torch.zeros(1)
        case "missing moment":
            del state["exp_avg_sq.vector"]
        case "missing master":
            del state["master.vector"]
        case "missing parameter":
            state = {name: t for name, t in state.items() if not name.endswith("vector")}
        case _:
            state["exp_avg.vector"] = torch.zeros(3)
    fresh = parameters(torch.bfloat16)
    with pytest.raises(CheckpointError, match="missing, unknown or of another shape") as caught:
        MasterOptimizer(fresh, AdamW()).restore(state)
    assert "stranger" in caught.value.where or "vector" in caught.value.where
    assert all(torch.equal(fresh[name], parameters(torch.bfloat16)[name]) for name in fresh)
