"""Sets how OpenMP's threads wait for each other, and which instructions oneDNN uses: both before torch is imported."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from pathlib import Path
from statistics import median_low

USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""If the user has set one of them, nothing is changed."""
SPINS = "10000"
"""Some 30 microseconds. OpenMP's own default spins for milliseconds, which beside another process costs a factor of twenty."""
LOOKS, PAUSE_SECONDS = 5, 0.002
INSTRUCTIONS, ALL_BUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"


def set_waiting(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads spin briefly on an idle machine, and sleep at once if other processes are computing now.

    A thread that spins holds the core that the thread it waits for may need; one that sleeps takes long to wake. Figures:
    docs/benchmarks.md.
    """
    if any(name in environment for name in USER):
        return
    if running_elsewhere():
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        environment["GOMP_SPINCOUNT"] = SPINS


def leave_out_tiles(environment: MutableMapping[str, str]) -> None:
    """Have oneDNN multiply bf16 matrices without Intel's AMX, unless the user has set what it may use.

    With AMX the last bit of a few sums depends on the number of rows: a token was computed differently in sampling and training,
    by 0.07 nats on average with SmolLM2-135M, and the proof of a run refused it.
    """
    environment.setdefault(INSTRUCTIONS, ALL_BUT_TILES)


def running_elsewhere(path: Path = Path("/proc/loadavg")) -> int:
    """Number of threads that compute at this moment besides this one; 0 where the system does not tell."""
    counts = []
    for _ in range(LOOKS):
        try:
            running, _, _ = path.read_text().split()[3].partition("/")
            counts.append(int(running) - 1)
        except (OSError, ValueError, IndexError):
            return 0
        time.sleep(PAUSE_SECONDS)
    return max(0, median_low(counts))
