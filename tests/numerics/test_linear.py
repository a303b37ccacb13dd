"""The quantised linear layer against straight-through autograd written out; traps 1, 2, 4 and 5 of shared precision notes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.numerics.formats import fake_quantise
from lockstep.numerics.linear import Quantiser, quantised_linear

NUMERICS = ("mxfp4-w4a4", "mxfp4-w4a16", "nvfp4-w4a4", "nvfp4-w4a16")


def through(x: Tensor, quantised: Tensor) -> Tensor:
    """The quantised value, with the gradient of x."""
    return x + (quantised - x).detach()


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, quantiser: Quantiser) -> Tensor:
    kind = quantiser.numeric[:5]
    used_x = x
    if quantiser.numeric.endswith("a4"):
        used_x = through(x, fake_quantise(x, kind, scale=quantiser.scale, per_row=True))
    return torch.nn.functional.linear(used_x, through(weight, fake_quantise(weight, kind, scale=quantiser.scale)), bias)


def operands(width: int = 96, outputs: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return made(2, 5, width), made(outputs, width), made(outputs)


@pytest.mark.parametrize("width", [96, 41])
@pytest.mark.parametrize("numeric", NUMERICS)
def test_output_and_gradients_are_straight_through(numeric: str, width: int):
    quantiser = Quantiser(numeric)
    ours, theirs = operands(width), operands(width)
    out, expected = quantised_linear(*ours, quantiser), reference(*theirs, quantiser)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(expected)
    out.backward(seed)
    expected.backward(seed)
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert mine.grad.abs().max() > 0
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-12, atol=1e-12)


def test_it_is_the_operands_that_are_quantised_and_not_the_output():
    x, weight, bias = (t.detach() for t in operands())
    out = quantised_linear(x, weight, bias, Quantiser("mxfp4-w4a4"))
    exact = torch.nn.functional.linear(fake_quantise(x, "mxfp4"), fake_quantise(weight, "mxfp4"), bias)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    plain = torch.nn.functional.linear(x, weight, bias)
    assert not torch.allclose(out, plain, rtol=1e-3)
    assert not torch.allclose(out, fake_quantise(plain, "mxfp4"), rtol=1e-3)


def test_the_input_gradient_uses_the_quantised_weight():
    x, weight, bias = operands()
    out = quantised_linear(x, weight, bias, Quantiser("mxfp4-w4a4"))
    seed = torch.randn_like(out)
    out.backward(seed)
    torch.testing.assert_close(x.grad, seed @ fake_quantise(weight.detach(), "mxfp4"), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(x.grad, seed @ weight.detach(), rtol=1e-3)


def test_rows_of_the_weight_are_quantised_by_themselves():
    x, weight, bias = (t.detach() for t in operands(41, 12))
    weight = weight * torch.logspace(-3, 3, 12, dtype=torch.float64)[:, None]
    order = torch.randperm(12)
    out = quantised_linear(x, weight, bias, Quantiser("mxfp4-w4a4"))
    permuted = quantised_linear(x, weight[order], bias[order], Quantiser("mxfp4-w4a4"))
    torch.testing.assert_close(permuted, out[..., order], rtol=1e-12, atol=1e-12)


def test_only_what_is_asked_for_has_a_gradient():
    x, weight, bias = operands()
    weight.requires_grad_(False)
    quantised_linear(x, weight, None, Quantiser("mxfp4-w4a4")).sum().backward()
    assert x.grad is not None
    assert (weight.grad, bias.grad) == (None, None)


@pytest.mark.parametrize("scale", ["floor", "rceil", "ceil"])
def test_the_scale_mode_reaches_both_operands(scale: str):
    x, weight, _ = (t.detach() for t in operands())
    out = quantised_linear(x, weight, None, Quantiser("mxfp4-w4a4", scale))
    expected = fake_quantise(x, "mxfp4", scale=scale) @ fake_quantise(weight, "mxfp4", scale=scale).T
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
