"""Processed prompts that later requests may begin with: the earlier turns of an episode or of a client's conversation."""

from __future__ import annotations

from collections import OrderedDict

from lockstep.rollout.slots import Prefix
from lockstep.types import TokenIds

KEPT_BYTES = 2 * 2**30
"""Most memory of kept keys and values; those used longest ago are dropped."""
MOST_KEPT = 1024
"""Most prompts that are kept: a lookup compares with each."""


class KeptPrompts:
    """Keys and values of prompts by their token ids. They are those of one version of the weights: a new one clears them."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._kept: OrderedDict[TokenIds, Prefix] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, ids: TokenIds, least: int) -> Prefix | None:
        """Return the keys and values of the longest known beginning of `ids`, at least `least` tokens, and not all of them."""
        best, found = max(least, 1) - 1, None
        for known in self._kept:
            if best + 1 < len(ids) and known[: best + 1] == ids[: best + 1]:
                best, found = _common(known, ids[:-1], best), known
        if found is None:
            return None
        self._kept.move_to_end(found)
        pairs = self._kept[found].pairs
        return Prefix(best, {layer: (key[:, :best], value[:, :best]) for layer, (key, value) in pairs.items()})

    def keep(self, ids: TokenIds, prefix: Prefix) -> None:
        """Keep a processed prompt instead of those that are its beginning; nothing if it is itself the beginning of one."""
        if any(known[: len(ids)] == ids for known in self._kept):
            return
        for known in [known for known in self._kept if ids[: len(known)] == known]:
            self._drop(known)
        self._kept[ids] = prefix
        self.bytes += _size(prefix)
        while self.bytes > self._limit or len(self._kept) > MOST_KEPT:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self.bytes = 0

    def _drop(self, ids: TokenIds) -> None:
        self.bytes -= _size(self._kept.pop(ids))


def _size(prefix: Prefix) -> int:
    return sum(tensor.numel() * tensor.element_size() for pair in prefix.pairs.values() for tensor in pair)


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
