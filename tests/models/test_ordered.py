"""Attention and products in one order: right on a CPU under Triton's interpreter; their bits are a matter of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from lockstep.models import exact
from lockstep.models.ordered import QUERIES, Piece, tiles_of
from tests.interpreter import interpreted
from tests.models import ordered_reference


@pytest.mark.parametrize(
    "check",
    [
        ordered_reference.attention,
        ordered_reference.windows_and_sinks,
        ordered_reference.products,
        ordered_reference.gradients,
    ],
)
def test_kernels_under_the_interpreter(check: Callable[[], None]):
    interpreted(check)


def test_tiles_say_where_keys_are():
    cpu = torch.device("cpu")
    pieces = [Piece(0, 3, 0), Piece(3, 10, 3, ((3, 0),)), Piece(50, QUERIES + 2, 13, ((3, 0), (13, 3)))]
    assert tiles_of(pieces, cpu).tolist() == [
        [50 + QUERIES, 2, 13 + QUERIES, 3, 13, 0, 0, 37],
        [50, QUERIES, 13, 3, 13, 0, 0, 37],
        [3, 10, 3, 3, 3, 0, 0, 0],
        [0, 3, 0, 0, 0, 0, 0, 0],
    ]
    assert tiles_of([Piece(7, 4, 20, keys=100)], cpu).tolist() == [[7, 4, 20, 0, 0, 0, 0, 100]]


def test_more_rows_are_those_after_it_in_memory_or_a_copy():
    memory = torch.arange(60.0).view(6, 10)
    x = memory[1:3, :7]
    more = exact.with_rows(x, 4)
    assert more.data_ptr() == x.data_ptr()
    assert torch.equal(more, memory[1:5, :7])
    assert exact.with_rows(x, 5).data_ptr() == x.data_ptr()  # the last row ends before the memory does
    copied = exact.with_rows(x, 6)
    assert copied.data_ptr() != x.data_ptr()
    assert copied.shape == (6, 7)
    assert torch.equal(copied[:2], x)
    assert exact.with_rows(memory, 7).shape == (7, 10)


@pytest.mark.gpu
@pytest.mark.parametrize("room", [0, exact.PADDED])
def test_few_rows_have_the_bits_of_many_whatever_computes_them(room: int):
    """Where cuBLAS splits K for few rows, it is called with more of them, or not at all."""
    torch.manual_seed(0)
    weight = torch.randn(1536, 8960, device="cuda").bfloat16() * 0.02
    x = torch.randn(max(256, room), 8960, device="cuda").bfloat16()
    exact.enable("")
    try:
        with torch.no_grad():
            many = exact.linear(torch.cat([x[:256], torch.randn(3840, 8960, device="cuda").bfloat16()]), weight)
            for count in (8, 32, 64, 96, 128, 200, 256):
                assert torch.equal(exact.linear(x[:count], weight), many[:count]), count
        assert any("(as " in product for product in exact.replaced_products())
    finally:
        exact.enable("", on=False)
