"""What PyTorch's allocator of GPU memory is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lockstep.rollout.allocator import ALLOCATOR

SHOW = """
import os, torch
from lockstep.rollout.allocator import grow_segments, fix_segments
{calls}
print(torch._C._accelerator_getAllocatorSettings())
"""
BY_NAME = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell its settings"
)


def told(calls: str, environment: dict[str, str]) -> str:
    """Settings in force in a process of its own: they are the process's."""
    clean = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    clean |= {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.check_output([sys.executable, "-c", SHOW.format(calls=calls)], env=clean, text=True).strip()


@BY_NAME
@pytest.mark.parametrize("name", ALLOCATOR)
def test_segments_grow_beside_what_the_user_set(name: str) -> None:
    grow = "grow_segments(os.environ)"
    assert told(grow, {}) == "expandable_segments:True"
    assert told(grow, {name: "max_split_size_mb:64"}) == "max_split_size_mb:64,expandable_segments:True"
    assert told(f"{grow}; {grow}", {name: "max_split_size_mb:64"}) == "max_split_size_mb:64,expandable_segments:True"


@BY_NAME
@pytest.mark.parametrize("name", ALLOCATOR)
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:64, expandable_segments:True"])
def test_what_the_user_says_of_segments_stays(name: str, value: str) -> None:
    assert told("grow_segments(os.environ)", {name: value}) == told("", {name: value}) == value


@BY_NAME
def test_vllm_has_blocks_of_fixed_sizes_whatever_was_before() -> None:
    """S1-21. torch reads the environment when it is imported: taking a value out of it is not enough."""
    vllm = "from lockstep.rollout.vllm.build import prepare_environment; prepare_environment()"
    assert told(f"grow_segments(os.environ); {vllm}", {}) == "expandable_segments:False"
    user = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}
    assert told(vllm, user) == "max_split_size_mb:64,expandable_segments:False"


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_does_as_it_is_told() -> None:
    show = "; ".join(
        [
            "torch.zeros(8, device='cuda')",
            "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()])",
            "import sys; sys.exit()",
        ]
    )
    assert told(f"grow_segments(os.environ); {show}", {}) == "[True]"
    assert told(f"grow_segments(os.environ); fix_segments(os.environ); {show}", {}) == "[False]"
