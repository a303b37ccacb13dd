"""Measures a data set's lengths in tokens, as the recipe's chat format renders its prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.data.questions import question_digest
from lockstep.types import Prompt

PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a set of prompts."""

    percentiles: tuple[tuple[int, int], ...]
    """(percent, tokens): the smallest length that this share of the prompts does not exceed."""
    mean: float
    total: int
    too_long: int
    """Number of prompts above the limit."""
    longest: str
    """Id of the longest prompt."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Counts of equal questions and answers."""

    prompts: int
    distinct: int
    """Number of questions that differ in more than spacing and case."""
    conflicting: int
    """Number of questions with more than one answer."""
    most: int
    """Number of times that the most frequent question occurs."""
    answers: int
    """Number of different answers."""


def lengths(prompts: Sequence[Prompt], count: Callable[[Prompt], int], limit: int | None = None) -> Lengths:
    """Measure prompts by `count`. Raises ValueError for no prompts."""
    counts = [count(prompt) for prompt in prompts]
    order = sorted(counts)
    if not order:
        raise ValueError("there are no prompts to measure")
    longest = max(range(len(counts)), key=counts.__getitem__)
    return Lengths(
        tuple((percent, order[max(0, -(-percent * len(order) // 100) - 1)]) for percent in PERCENTILES),
        sum(order) / len(order),
        sum(order),
        sum(size > limit for size in order) if limit is not None else 0,
        prompts[longest].id,
    )


def repeats(prompts: Sequence[Prompt]) -> Repeats:
    """Count equal questions and answers."""
    asked: Counter[bytes] = Counter()
    answers: dict[bytes, str] = {}
    conflicting: set[bytes] = set()
    for prompt in prompts:
        digest = question_digest(prompt.messages)[:16]
        asked[digest] += 1
        if answers.setdefault(digest, prompt.answer) != prompt.answer:
            conflicting.add(digest)
    different = len({prompt.answer for prompt in prompts})
    return Repeats(len(prompts), len(asked), len(conflicting), max(asked.values(), default=0), different)
