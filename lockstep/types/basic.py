"""Basic types that all other records are made of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
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


class Message(TypedDict):
    """One chat turn. Example: {"role": "user", "content": "State the final answer: 4 + 3 ="}"""

    role: str
    content: str
