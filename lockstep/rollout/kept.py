"""A cache of the keys and values of earlier turns: a later request whose prompt begins with the same token ids reuses them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.types import TokenIds

MOST_KEPT = 1024
"""Most histories that are kept: a lookup compares with each."""
T = TypeVar("T")


class Kept(Generic[T]):
    """Keys and values by their token ids, in an engine's own form. They are those of one version of the weights: a new one
    clears them.
    """

    def __init__(
        self,
        limit: float = math.inf,
        size: Callable[[T], int] = lambda value: 0,
        dropped: Callable[[T], None] = lambda value: None,
    ) -> None:
        """Take the most bytes and the `size` of a value; those used longest ago are dropped, and `dropped` is told of each."""
        self._limit, self._size, self._dropped = limit, size, dropped
        self._kept: OrderedDict[TokenIds, T] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, ids: TokenIds, least: int) -> tuple[int, T] | None:
        """Return the length of the longest known beginning of `ids`, at least `least` and not all, and the value that has it."""
        best, found = max(least, 1) - 1, None
        for known in self._kept:
            if best + 1 < len(ids) and known[: best + 1] == ids[: best + 1]:
                best, found = _common(known, ids[:-1], best), known
        if found is None:
            return None
        self._kept.move_to_end(found)
        return best, self._kept[found]

    def keep(self, ids: TokenIds, value: T) -> None:
        """Keep a history instead of those that are its beginning; drop it at once if it is itself the beginning of one."""
        if any(known[: len(ids)] == ids for known in self._kept):
            self._dropped(value)
            return
        for known in [known for known in self._kept if ids[: len(known)] == known]:
            self._drop(known)
        self._kept[ids] = value
        self.bytes += self._size(value)
        while self.bytes > self._limit or len(self._kept) > MOST_KEPT:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drop what was used longest ago; False if there is nothing."""
        if self._kept:
            self._drop(next(iter(self._kept)))
            return True
        return False

    def clear(self) -> None:
        """Drop everything."""
        while self.drop_oldest():
            pass

    def _drop(self, ids: TokenIds) -> None:
        value = self._kept.pop(ids)
        self.bytes -= self._size(value)
        self._dropped(value)


def _common(one: TokenIds, other: TokenIds, least: int) -> int:
    """Return the length of the common beginning, known to be at least `least`, by bisection: slices are compared fast."""
    low, high = least, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
