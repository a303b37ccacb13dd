"""What the environment says to PyTorch's allocator."""

from __future__ import annotations

import pytest

from lockstep.rollout.allocator import ALLOCATOR, grow_segments
from lockstep.rollout.vllm.environment import prepare


@pytest.mark.parametrize("name", ALLOCATOR)
def test_segments_grow_beside_what_the_user_set(name: str) -> None:
    environment: dict[str, str] = {}
    grow_segments(environment)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment = {name: "max_split_size_mb:64"}
    grow_segments(environment)
    assert environment == {name: "max_split_size_mb:64,expandable_segments:True"}
    grow_segments(environment)  # a second model in this process
    assert environment == {name: "max_split_size_mb:64,expandable_segments:True"}


@pytest.mark.parametrize("name", ALLOCATOR)
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:64, expandable_segments:True"])
def test_what_the_user_says_of_segments_stays(name: str, value: str) -> None:
    environment = {name: value}
    grow_segments(environment)
    assert environment == {name: value}


def test_vllm_takes_them_out_again() -> None:
    """The native engine ran in this process before, on a CPU."""
    environment: dict[str, str] = {}
    grow_segments(environment)
    prepare(environment, cuda_started=False)
    assert not any(name in environment for name in ALLOCATOR)
