"""A micro-batch that does not fit is run in two halves, with the same gradient."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.errors import LearnerError
from lockstep.learner.packing import Packed

Run = Callable[[Packed], None]
"""Forward and backward pass of a micro-batch; it records what it did only when both are done."""

NO_ROOM = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
"""What libraries say that ask the driver for memory themselves, when torch's allocator has left none."""


def run_or_halve(
    packed: Packed, run: Run, repack: Callable[[Sequence[int]], Packed], collected: Callable[[], list[nn.Parameter]]
) -> int:
    """Run a micro-batch; if the GPU's memory runs out, once more by halves of its tokens. Returns the splits, 0 or 1.

    A pass that broke off may have finished the gradients of some parameters: `collected` names those of the pass. They are left
    out of the halves, so that each parameter's gradient counts every sequence once. Raises LearnerError if a half does not fit.
    """
    if (reason := _attempt(run, packed)) is None:
        return 0
    order = packed.order
    if len(order) < 2:
        raise _too_large(packed, reason)
    middle = _middle(order, repack)
    with _frozen(collected()):
        for half in (order[:middle], order[middle:]):
            smaller = repack(half)
            if (reason := _attempt(run, smaller)) is not None:
                raise _too_large(smaller, reason)
    return 1


def _middle(order: Sequence[int], repack: Callable[[Sequence[int]], Packed]) -> int:
    """Where to part the sequences so that the larger part has as few tokens as may be: their lengths may differ much."""

    def tokens(place: int) -> tuple[int, int]:
        return repack(order[:place]).tokens, repack(order[place:]).tokens

    low, high = 1, len(order) - 1
    while low < high:  # the first place with no more tokens behind it than before it
        middle = (low + high) // 2
        before, behind = tokens(middle)
        low, high = (low, middle) if before >= behind else (middle + 1, high)
    return min((place for place in (low - 1, low) if place), key=lambda place: max(tokens(place)))


def _attempt(run: Run, packed: Packed) -> str | None:
    """What the allocator said, if memory ran out."""
    try:
        run(packed)
        return None
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in NO_ROOM):
            raise
        reason = str(error).splitlines()[0]
    # Only here, when the exception has gone, are the tensors of its traceback free.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return reason


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _too_large(packed: Packed, reason: str) -> LearnerError:
    return LearnerError(
        f"the GPU's memory ran out in a micro-batch of {packed.tokens} tokens, {len(packed.order)} sequences: {reason}",
        where="update",
        fix="lower update.tokens_per_microbatch, set update.recompute=full or optimizer.states=8bit, or free memory of the GPU",
    )
