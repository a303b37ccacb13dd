"""8-bit moments: what a code loses, steps beside those of fp32 moments, and resuming bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.schema import AdamW
from lockstep.errors import CheckpointError
from lockstep.learner import adamw8bit
from lockstep.learner.adamw8bit import BLOCK, decode, encode, levels
from lockstep.learner.optimizer import MasterOptimizer

EIGHT = AdamW(states="8bit", weight_decay=0.1, betas=(0.9, 0.99), max_grad_norm=1e9)
FP32 = AdamW(weight_decay=0.1, betas=(0.9, 0.99), max_grad_norm=1e9)


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_256_in_seven_decades(signed: bool):
    table = levels(signed)
    assert len(table) == len(table.unique()) == 256
    assert (table.diff() > 0).all()
    assert float(table[-1]) == 1.0
    assert float(table[table > 0].min()) == pytest.approx(0.55e-6 if signed else 0.325e-6)
    assert 0.0 in table
    assert bool((table < 0).any()) == signed
    top = table[(table > 0.1) & (table < 1.0)]
    assert len(top) == (64 if signed else 128)


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_becomes_the_nearest_level_of_its_block(signed: bool):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 401, generator=generator, dtype=torch.float64) ** 5  # many magnitudes
    values = values if signed else values.abs()
    codes, scales = encode(values, signed=signed)
    assert codes.dtype == torch.uint8
    assert codes.shape == values.shape
    assert len(scales) == -(-values.numel() // BLOCK)
    flat, table = values.flatten(), levels(signed)
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        scale = block.abs().max()
        assert float(scales[start // BLOCK]) == float(scale)
        nearest = table[((block / scale)[:, None] - table).abs().argmin(1)] * scale
        found = decode(codes, scales, signed=signed).flatten()[start : start + BLOCK]
        small = (nearest == 0) & ~torch.tensor(signed)
        torch.testing.assert_close(found[~small], nearest[~small])


def test_a_small_second_moment_never_becomes_nothing():
    values = torch.tensor([1.0, 1e-30, 0.0, 1e-9])
    codes, scales = encode(values, signed=False)
    found = decode(codes, scales, signed=False)
    assert found.tolist() == [1.0, pytest.approx(0.325e-6), 0.0, pytest.approx(0.325e-6)]
    assert decode(*encode(torch.zeros(5), signed=True), signed=True).tolist() == [0.0] * 5


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (40, 30), "vector": (50,), "other": (30, 40)}
    return {name: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def loss_of(given: dict[str, nn.Parameter], number: int) -> Tensor:
    """A small network's error on another batch at each step."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(64, 40, generator=generator)
    hidden = torch.tanh(inputs @ given["matrix"].float() + given["vector"].float()[:30])
    return ((hidden @ given["other"].float() - inputs.roll(1, 1)) ** 2).mean()


def train(given: dict[str, nn.Parameter], optimizer: MasterOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(given, step)
        loss.backward()
        optimizer.step(0.02)
        losses.append(float(loss.detach()))
    return losses


def test_training_goes_as_with_fp32_moments():
    curves = []
    for settings in (FP32, EIGHT):
        given = parameters()
        curves.append(train(given, MasterOptimizer(given, settings), range(150)))
    fp32, eight = curves
    assert fp32[0] == eight[0]
    assert fp32[-1] < 0.2 * fp32[0]
    assert sum(eight[-20:]) == pytest.approx(sum(fp32[-20:]), rel=0.03)
    assert eight != fp32


def test_the_first_step_is_exact_but_for_rounding():
    """The moments of the first step are those of the gradient itself: each weight moves by the rate."""
    given, before = parameters(), parameters()
    optimizer = MasterOptimizer(given, AdamW(states="8bit"))
    loss_of(given, 0).backward()
    moved = given["matrix"].grad is not None and given["matrix"].grad.abs() > 1e-6
    optimizer.step(0.01)
    steps = (given["matrix"] - before["matrix"]).detach().abs()[moved]
    torch.testing.assert_close(steps, torch.full_like(steps, 0.01), rtol=2e-2, atol=0)


def test_weights_are_updated_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    whole, pieces = parameters(), parameters()
    train(whole, MasterOptimizer(whole, EIGHT), range(3))
    monkeypatch.setattr(adamw8bit, "CHUNK", 2 * BLOCK)
    train(pieces, MasterOptimizer(pieces, EIGHT), range(3))
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_a_weight_without_gradient_still_decays():
    given, plain = parameters(), parameters()
    MasterOptimizer(given, EIGHT).step(0.5)
    torch.testing.assert_close(given["matrix"].detach(), plain["matrix"].detach() * (1 - 0.5 * 0.1))
    assert torch.equal(given["vector"].detach(), plain["vector"].detach())


def test_the_moments_take_two_bytes_a_weight():
    given = parameters()
    optimizer = MasterOptimizer(given, EIGHT)
    train(given, optimizer, range(1))
    sizes = {name: t.numel() * t.element_size() for name, t in optimizer.tensors().items() if "step" not in name}
    weights = sum(p.numel() for p in given.values())
    assert sum(sizes.values()) < 2.1 * weights
    assert {name.split(".")[0] for name in sizes} == {"exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"}


@pytest.mark.parametrize("damage", ["other precision", "scales"])
def test_a_state_of_other_moments_is_refused(damage: str):
    given = parameters()
    optimizer = MasterOptimizer(given, FP32 if damage == "other precision" else EIGHT)
    train(given, optimizer, range(1))
    state = dict(optimizer.tensors())
    if damage == "scales":
        state["exp_avg_scale.matrix"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="missing, unknown or of another shape") as caught:
        MasterOptimizer(parameters(), EIGHT).restore(state)
    assert caught.value.where.startswith("exp_avg")
