"""PyTorch's allocator of GPU memory, which is set up by the environment before it starts."""

from __future__ import annotations

from collections.abc import MutableMapping

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The old and the new name of the same setting. vLLM looks at the old one only."""
SEGMENTS = "expandable_segments"


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Have the allocator keep segments that grow, unless the user says something of them. Call before CUDA starts.

    Otherwise it keeps a block of each size that a micro-batch ever needed, until the GPU has no more: with replies of many
    lengths that is far more than is in use.
    """
    if any(SEGMENTS in environment.get(name, "") for name in ALLOCATOR):
        return
    name = next((name for name in ALLOCATOR if environment.get(name)), ALLOCATOR[0])
    environment[name] = ",".join([*filter(None, [environment.get(name)]), f"{SEGMENTS}:True"])
