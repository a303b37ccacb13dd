"""Basic types that all other records are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

TokenIds: TypeAlias = tuple[int, ...]
Metrics: TypeAlias = dict[str, float]
WeightStream: TypeAlias = "Iterator[tuple[str, Tensor]]"
"""Pairs of a Hugging Face parameter name and its tensor. Adapters add their scaling as a one-element tensor."""


@lru_cache(maxsize=1 << 13)
def all_trained(count: int) -> tuple[bool, ...]:
    """Return the mask of a reply. Replies of a length share it: what is sent to workers then holds it once."""
    return (True,) * count


def repeated(number: float, count: int) -> tuple[float, ...]:
    """Return a number `count` times, as the advantage of a reply's tokens. Equal ones are one object, likewise."""
    return _repeated(number, count) if number else (number,) * count  # 0.0 and -0.0 are equal, and differ in a bit


@lru_cache(maxsize=1 << 10, typed=True)
def _repeated(number: float, count: int) -> tuple[float, ...]:
    return (number,) * count


def count_trained(mask: tuple[bool, ...]) -> int:
    """Return the number of trained tokens; that of a mask of `all_trained` without counting."""
    return len(mask) if mask is all_trained(len(mask)) else mask.count(True)


def spans(mask: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """Return the stretches of a mask that are all True or all False: which of the two, first place, end."""
    ends = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    return [(mask[start], start, end) for start, end in pairwise([0, *ends, len(mask)])] if mask else []


class Message(TypedDict):
    """One chat turn. Example: {"role": "user", "content": "State the final answer: 4 + 3 ="}"""

    role: str
    content: str
