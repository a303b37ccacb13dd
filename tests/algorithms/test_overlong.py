"""The soft penalty of DAPO, by the numbers of its paper and by hand."""

from __future__ import annotations

import pytest

from lockstep.algorithms.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0.0),
        (16383, 0.0),
        (16384, 0.0),
        (16385, 1 / 4096),
        (18432, 0.5),
        (20479, 4095 / 4096),
        (20480, 1.0),
        (30000, 1.0),
    ],
)
def test_as_in_the_paper(tokens: int, expected: float):
    """L_max 20480 with a cache of 4096 (arXiv 2503.14476, §4.1)."""
    assert overlong_penalty(tokens, 20480, buffer=4096, penalty=1.0) == pytest.approx(expected, abs=1e-12)


def test_the_penalty_scales_and_is_never_negative():
    assert [overlong_penalty(n, 8, buffer=4, penalty=2.0) for n in range(10)] == [0, 0, 0, 0, 0, 0.5, 1, 1.5, 2, 2]
    assert overlong_penalty(8, 8, buffer=4, penalty=0.0) == 0.0


def test_no_buffer_is_no_penalty():
    assert [overlong_penalty(n, 8, buffer=0, penalty=1.0) for n in (7, 8, 9)] == [0.0, 0.0, 0.0]
