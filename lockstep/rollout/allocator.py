"""How PyTorch's allocator keeps GPU memory: in segments that grow, or in blocks of fixed sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The old and the new name of the same setting. vLLM looks at the old one only."""
SEGMENTS = "expandable_segments"


def grow_segments(environment: Mapping[str, str]) -> None:
    """Have the allocator keep segments that grow, unless the user says something of them. Call before a model is loaded.

    Otherwise it keeps a block of each size that a micro-batch ever needed, until the GPU has no more: with replies of many
    lengths that is far more than is in use.
    """
    if not any(SEGMENTS in environment.get(name, "") for name in ALLOCATOR):
        _set(environment, grow=True)


def fix_segments(environment: Mapping[str, str]) -> None:
    """Have the allocator keep blocks of fixed sizes from now on: others have no handle that another process could open."""
    _set(environment, grow=False)


def _set(environment: Mapping[str, str], *, grow: bool) -> None:
    """The environment is read when torch is imported, which is long ago; what it says besides is said again here."""
    torch_core: Any = torch._C
    said = next((environment[name] for name in ALLOCATOR if environment.get(name)), "")
    kept = [part for part in said.split(",") if part.strip() and part.partition(":")[0].strip() != SEGMENTS]
    torch_core._accelerator_setAllocatorSettings(",".join([*kept, f"{SEGMENTS}:{grow}"]))
