"""Handles exhausted GPU memory: a micro-batch that does not fit is run in two halves with the same result; anything else is an
error that says which setting to change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lockstep.device import free_memory
from lockstep.errors import LearnerError
from lockstep.learner.packing import Packed

log = logging.getLogger(__name__)

T = TypeVar("T")
Run = Callable[[Packed], None]
"""Forward and backward pass of a micro-batch; it records its results only when both are done."""

NO_ROOM = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
"""Messages of libraries that ask the driver for memory themselves, when torch's allocator has left none."""


def run_or_halve(
    packed: Packed, run: Run, repack: Callable[[Sequence[int]], Packed], collected: Callable[[], list[nn.Parameter]]
) -> int:
    """Run a micro-batch; if the GPU's memory runs out, run it again by halves of its tokens. Returns the splits, 0 or 1.

    An aborted pass may have finished the gradients of some parameters: `collected` names them. They are left out of the halves,
    so that each parameter's gradient counts every sequence once. Raises LearnerError if a half does not fit.
    """
    found = _attempt(run, packed)
    if not isinstance(found, _NoRoom):
        return 0
    halves = _halves(packed, found, repack, "update")
    with _frozen(collected()):
        for half in halves:
            _fitting(run, repack(half), "update")
    return 1


def score_or_halve(
    packed: Packed, score: Callable[[Packed], Tensor], repack: Callable[[Sequence[int]], Packed]
) -> Tensor:
    """Return the result [R] of a pass without gradient for a micro-batch; if the GPU's memory runs out, by halves of its
    tokens.

    Raises LearnerError if a half does not fit.
    """
    found = _attempt(score, packed)
    if not isinstance(found, _NoRoom):
        return found
    log.warning("not enough memory to score %d tokens together (%s): done in two halves", packed.tokens, found.reason)
    halves = _halves(packed, found, repack, "scoring")
    return torch.cat([_fitting(score, repack(half), "scoring") for half in halves])


@contextmanager
def memory_for_step(where: str) -> Iterator[None]:
    """Raise LearnerError if an optimizer's step runs out of memory. Some weights may then have been stepped and others not."""
    try:
        yield
    except RuntimeError as error:
        if not _ran_out(error):
            raise
        raise LearnerError(
            f"the GPU's memory ran out in the optimizer's step: {str(error).splitlines()[0]}",
            where=where,
            fix="free memory of the GPU or set optimizer.offload=cpu, then resume from the last checkpoint; or start a run with "
            "optimizer.states=8bit or an adapter",
        ) from error


def _halves(
    packed: Packed, found: _NoRoom, repack: Callable[[Sequence[int]], Packed], where: str
) -> tuple[Sequence[int], Sequence[int]]:
    order = packed.order
    if len(order) < 2:
        raise _too_large(packed, found, where)
    middle = _middle(order, repack)
    return order[:middle], order[middle:]


def _fitting(run: Callable[[Packed], T], packed: Packed, where: str) -> T:
    found = _attempt(run, packed)
    if isinstance(found, _NoRoom):
        raise _too_large(packed, found, where)
    return found


def _middle(order: Sequence[int], repack: Callable[[Sequence[int]], Packed]) -> int:
    """Return where to split the sequences so that both parts have similar numbers of tokens; lengths may differ much."""

    def tokens(place: int) -> tuple[int, int]:
        return repack(order[:place]).tokens, repack(order[place:]).tokens

    low, high = 1, len(order) - 1
    while low < high:  # the first place with no more tokens after it than before it
        middle = (low + high) // 2
        before, behind = tokens(middle)
        low, high = (low, middle) if before >= behind else (middle + 1, high)
    return min((place for place in (low - 1, low) if place), key=lambda place: max(tokens(place)))


@dataclass(frozen=True, slots=True)
class _NoRoom:
    """Record of the allocator's error."""

    reason: str


def _attempt(run: Callable[[Packed], T], packed: Packed) -> T | _NoRoom:
    try:
        return run(packed)
    except RuntimeError as error:
        if not _ran_out(error):
            raise
        found = _NoRoom(str(error).splitlines()[0])
    # The tensors of the exception's traceback are free only after the exception is gone.
    free_memory()
    return found


def _ran_out(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in NO_ROOM)


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _too_large(packed: Packed, found: _NoRoom, where: str) -> LearnerError:
    keeps = where == "update"  # activations and moments
    ways = ", set update.recompute=full or optimizer.states=8bit" if keeps else ""
    return LearnerError(
        f"the GPU's memory ran out in a micro-batch of {packed.tokens} tokens, {len(packed.order)} sequences: {found.reason}",
        where=where,
        fix=f"lower update.tokens_per_microbatch{ways}, or free memory of the GPU",
    )
