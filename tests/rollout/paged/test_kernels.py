"""The Triton kernels, run by Triton's interpreter in a process of its own, against their plain torch twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.interpreter import interpreted

pytest.importorskip("triton")

from tests.rollout.paged import interpreted as checks


@pytest.mark.slow
@pytest.mark.parametrize("part", [checks.layers, checks.products, checks.attention, checks.sampling])
def test_the_kernels_compute_what_plain_torch_does(part: Callable[[], None]):
    interpreted(part, seconds=600)
