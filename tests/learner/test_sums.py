"""Sums of gradients: the same bits by the kernel and by torch, in the order of the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.learner.sums import add_rows_
from tests.interpreter import interpreted

SIZES = (1, 63, 4096, 4096 * 2 + 17)


def given(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    sum_X = torch.randn(size, generator=generator)
    return sum_X, (100 * torch.randn(3, size, generator=generator)).to(dtype)


def test_rows_are_added_one_after_the_other():
    sum_X, rows_3X = given(64, torch.bfloat16)
    expected = ((sum_X + rows_3X[0]) + rows_3X[1]) + rows_3X[2]
    add_rows_(sum_X, rows_3X)
    assert torch.equal(sum_X, expected)
    add_rows_(sum_X, rows_3X[:2], begun=False)
    assert torch.equal(sum_X, rows_3X[0].float() + rows_3X[1])
    add_rows_(sum_X[:0], rows_3X[:, :0])


def compare(device: str) -> None:
    from lockstep.learner.sum_kernel import add_rows_by_kernel_

    for dtype in (torch.bfloat16, torch.float32):
        for size in SIZES:
            for count in (1, 3):
                for begun in (True, False):
                    sum_X, rows_3X = given(size, dtype)
                    found = sum_X.to(device)
                    add_rows_by_kernel_(found, rows_3X[:count].to(device), begun)
                    add_rows_(sum_X, rows_3X[:count], begun=begun)
                    assert torch.equal(found.cpu(), sum_X), (dtype, size, count, begun)


def test_the_kernel_gives_the_same_bits():
    pytest.importorskip("triton")
    interpreted(compare, "cpu")


@pytest.mark.gpu
def test_the_kernel_gives_the_same_bits_on_a_gpu():
    compare("cuda")
