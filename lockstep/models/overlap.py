"""Overlap of a kernel's launch with the end of the kernel before it (programmatic dependent launch), on Hopper and later.

A decode step is hundreds of short kernels; between two of them a GPU is idle for a microsecond or two. With the options
`overlap()` a kernel is made ready while the one before it ends; it must begin with `await_input()`, which waits for all that was
written before. A kernel that is launched without the options passes the wait at once.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from lockstep.device import since_hopper


@triton.jit
def await_input():
    """Wait until the kernels before have ended, and what they wrote can be read."""
    if cuda_capability_geq(9, 0):  # since_hopper, for the compiler
        tl.extra.cuda.gdc_wait()


def overlap() -> dict[str, bool]:
    """Return the options of a launch that may overlap with the end of the kernel before it; none where that is not possible."""
    return {"launch_pdl": True} if since_hopper() else {}
