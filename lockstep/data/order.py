"""Chooses the questions of a step: a pure function of the step number, with no state to save or restore."""

from __future__ import annotations

from functools import lru_cache

from lockstep.seeds import seed_for

_MASK = (1 << 64) - 1


def batch_indices(step: int, size: int, pool: int, seed: int) -> tuple[int, ...]:
    """Return the `size` different indices into a pool that step 0, 1, 2, … takes.

    The steps are dealt into epochs of pool // size steps. Within an epoch no index comes twice; each epoch has its own
    order, and the pool % size indices that are left out differ from epoch to epoch. Depends on the arguments alone.

    Raises ValueError if step < 0, size < 1, or size > pool.
    """
    if step < 0 or not 1 <= size <= pool:
        raise ValueError(f"cannot draw {size} prompts for step {step} from a pool of {pool}")
    epoch, position = divmod(step, pool // size)
    return _permutation(pool, seed, epoch)[position * size : (position + 1) * size]


@lru_cache(maxsize=4)
def _permutation(pool: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return 0 … pool - 1 ordered by a 64-bit hash of (seed, epoch, index)."""
    key = seed_for("order", seed, epoch)
    return tuple(sorted(range(pool), key=lambda index: (_splitmix(key + index), index)))


def _splitmix(value: int) -> int:
    """Return SplitMix64's output for a counter (Steele, Lea, Flood 2014)."""
    z = (value * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
