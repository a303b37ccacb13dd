"""The GPU's head, by Triton's interpreter: values and gradients are those of the tiles that a CPU uses, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.models.mm import add_product_
from tests.interpreter import interpreted

HEADS: tuple[dict[str, Any], ...] = ({}, {"bias": True}, {"softcap": 1.5}, {"bias": True, "softcap": 1.5, "scale": 2.5})


def parts(rows: int, vocab: int, dtype: torch.dtype, *, bias: bool) -> tuple[list[Tensor | None], Tensor]:
    """Hidden states, weight and bias, then targets."""
    generator = torch.Generator().manual_seed(rows + vocab)
    shapes = ((rows, 16), (vocab, 16), (vocab,))
    tensors = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return [*tensors[:2], tensors[2] if bias else None], torch.randint(0, vocab, (rows,), generator=generator)


def run(function: Any, given: list[Tensor | None], targets: Tensor, settings: dict[str, Any]) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of a mixture of both."""
    mix = torch.linspace(-1, 1, targets.numel())
    logprobs, entropy = function.apply(*given, targets, 0.7, settings.get("softcap"), settings.get("scale", 1.0))
    grads = torch.autograd.grad(
        (logprobs * mix).sum() + 0.3 * (entropy * mix.flip(0)).sum(), [x for x in given if x is not None]
    )
    return [logprobs, entropy, *grads]


def many_tiles() -> None:
    """Three tiles of rows, blocks of vocabulary, no multiple of either; the last tile is kept, the others are made again."""
    from lockstep.models import head_kernels
    from lockstep.models.heads import _TokenLogprobs

    head_kernels.ROWS, head_kernels.TILE_BYTES, head_kernels.BLOCK = 8, 301 * 4 * 16, 128
    assert (head_kernels.tile_rows(301, torch.float32), head_kernels.tile_rows(301, torch.bfloat16)) == (16, 32)
    for settings in HEADS:
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            given, targets = parts(37, 301, dtype, bias=settings.get("bias", False))
            wide = [None if x is None else x.detach().double().requires_grad_() for x in given]
            ours = run(head_kernels.FusedTokenLogprobs, given, targets, settings)
            theirs = run(_TokenLogprobs, wide, targets, settings)
            for a, b in zip(ours, theirs, strict=True):
                assert float((a.double() - b).norm() / b.norm()) < tolerance, (settings, dtype)
            assert ours[0].dtype == ours[1].dtype == torch.float32
            assert ours[2].dtype == ours[3].dtype == dtype


@pytest.mark.slow
def test_values_and_gradients_over_many_tiles():
    interpreted(many_tiles)


def odd_cases() -> None:
    from lockstep.models.head_kernels import FusedTokenLogprobs
    from lockstep.models.heads import Head, _TokenLogprobs, token_logprobs

    function: Any = FusedTokenLogprobs
    given, targets = parts(5, 40, torch.float32, bias=False)
    hidden, weight, _ = given
    assert hidden is not None
    assert weight is not None
    frozen = function.apply(hidden, weight.detach(), None, targets, 1.0, None, 1.0)
    (by_hidden,) = torch.autograd.grad(frozen[0].sum(), hidden, retain_graph=True)
    (again,) = torch.autograd.grad(frozen[0].sum(), hidden)  # the kept tile is spent: it is made anew
    assert torch.equal(by_hidden, again)
    with torch.no_grad():
        assert not function.apply(hidden, weight, None, targets, 1.0, None, 1.0)[0].requires_grad
    assert function.apply(hidden[:0], weight, None, targets[:0], 1.0, None, 1.0)[0].shape == (0,)

    extreme = torch.eye(4) * torch.tensor([1e4, -1e4, 0.0, 1e4])
    ones = torch.ones(3, 4, requires_grad=True)
    logprobs, entropy = function.apply(ones, extreme, None, torch.tensor([0, 1, 2]), 1.0, None, 1.0)
    torch.testing.assert_close(logprobs, torch.tensor([-0.693147, -20000.693, -10000.693]))
    torch.testing.assert_close(entropy, torch.full((3,), 0.693147))
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), ones)
    assert grad.isfinite().all()
    broken = function.apply(ones * torch.nan, extreme, None, torch.tensor([0, 1, 2]), 1.0, None, 1.0)
    assert broken[0].isnan().all(), "what is not a number must not look like one"

    # On a CPU the tiles stay in use.
    assert torch.equal(
        token_logprobs(Head(weight), hidden, targets)[0],
        _TokenLogprobs.apply(hidden, weight, None, targets, 1.0, None, 1.0)[0],  # type: ignore[no-untyped-call]
    )


@pytest.mark.slow
def test_frozen_weights_second_passes_extremes_and_nothing_at_all():
    interpreted(odd_cases)


def test_sums_of_products_are_wide():
    """64 products of 1 beside a sum of 2^-10: in half precision it would be gone."""
    total = torch.full((4, 3), 2**-10)
    ones = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, 3, dtype=torch.bfloat16)
    add_product_(total, *ones)
    assert (total == 64 + 2**-10).all()
    wide = torch.zeros(2, 2, dtype=torch.float64)
    add_product_(wide, torch.full((2, 5), 0.1, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64))
    torch.testing.assert_close(wide, torch.full((2, 2), 0.5, dtype=torch.float64))
