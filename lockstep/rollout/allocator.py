"""Sets the mode of PyTorch's GPU memory allocator: expandable segments, or blocks of fixed sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The old and the new name of the same setting. vLLM reads only the old one."""
SEGMENTS = "expandable_segments"


def grow_segments(environment: Mapping[str, str]) -> None:
    """Make the allocator use growing segments, unless the user has set it. Call before a model is loaded.

    Otherwise it keeps a block of each size that a micro-batch ever needed, until the GPU is full: with replies of many lengths
    that is far more than the memory in use.
    """
    if not any(SEGMENTS in environment.get(name, "") for name in ALLOCATOR):
        _set(environment, grow=True)


def fix_segments(environment: Mapping[str, str]) -> None:
    """Use blocks of fixed sizes from now on: growing segments have no handle that another process could open."""
    _set(environment, grow=False)


def _set(environment: Mapping[str, str], *, grow: bool) -> None:
    """Set the mode at run time: torch reads the environment at import, long before, so its other settings are repeated here."""
    torch_core: Any = torch._C
    said = next((environment[name] for name in ALLOCATOR if environment.get(name)), "")
    kept = [part for part in said.split(",") if part.strip() and part.partition(":")[0].strip() != SEGMENTS]
    torch_core._accelerator_setAllocatorSettings(",".join([*kept, f"{SEGMENTS}:{grow}"]))
