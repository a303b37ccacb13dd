"""Basic types that all other records are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

TokenIds: TypeAlias = tuple[int, ...]
Metrics: TypeAlias = dict[str, float]
WeightStream: TypeAlias = "Iterator[tuple[str, Tensor]]"
"""Pairs of a Hugging Face parameter name and its tensor. Adapters add their scaling as a one-element tensor."""


class Message(TypedDict):
    """One chat turn. Example: {"role": "user", "content": "State the final answer: 4 + 3 ="}"""

    role: str
    content: str
