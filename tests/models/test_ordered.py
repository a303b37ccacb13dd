"""Attention and products in one order: right on a CPU under Triton's interpreter; their bits are a matter of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

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
