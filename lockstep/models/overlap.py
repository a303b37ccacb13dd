"""Overlap of a kernel's launch with the end of the kernel before it (programmatic dependent launch), on Hopper and later.

A decode step is hundreds of short kernels; between two of them a GPU is idle for a microsecond or two. With the options
`overlap()` a kernel is made ready as soon as all programs of the one before it have begun, if that one calls `await_input()`,
and else while it ends. It must begin with `await_input()`, which waits for all that was written before: for the kernel before,
which has itself waited for those before it. A kernel that is launched without the options passes the wait at once.
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
    """Let the next kernel be made ready; wait until those before have ended, and what they wrote can be read."""
    if cuda_capability_geq(9, 0):  # since_hopper, for the compiler
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(at):
    """Bring the lines of memory at these addresses into the L2 cache, without waiting for them.

    It may stand before `await_input()`, for what no kernel before writes: weights are then on their way while those end.
    """
    if cuda_capability_geq(9, 0):
        fetch: tl.constexpr = "prefetch.global.L2 [$1];\nmov.b32 $0, 0;"
        tl.inline_asm_elementwise(fetch, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def overlap() -> dict[str, bool]:
    """Return the options of a launch that may overlap with the end of the kernel before it; none where that is not possible."""
    return {"launch_pdl": True} if since_hopper() else {}
