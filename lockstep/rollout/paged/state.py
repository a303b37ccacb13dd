"""State of a decode step on the device: the rows being decoded, and the pages that hold their keys and values.

Legend: B rows, L layers, K key/value heads, D head size, P tokens of a page, S pages of a row, N sampled tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

PAGE = 64
"""Tokens of a page: one block of the attention kernel."""
PROGRAMS = 528
"""Number of attention programs that keep a large GPU busy (four for each of 132 multiprocessors): with fewer rows, each row's
keys are split over several.
"""


@dataclass(slots=True)
class Rows:
    """State of every row, at fixed addresses: captured graphs read and write these tensors in place."""

    next_B: Tensor
    """int64: the next token to feed."""
    position_B: Tensor
    """int32: its position, where its key and value are written."""
    seed_B: Tensor
    """int64: bits of the sample's 64-bit seed."""
    drawn_B: Tensor
    """int32: tokens sampled so far."""
    budget_B: Tensor
    """int32: most tokens that it may sample."""
    temperature_B: Tensor
    """fp32; 0 is greedy."""
    ignore_B: Tensor
    """int8: 1 if end tokens do not end it."""
    done_B: Tensor
    """int8: 1 once it has ended; a finished row does not change any more."""
    table_BS: Tensor
    """int32: its pages in order; page 0 belongs to no sequence and serves inactive rows."""
    ids_BN: Tensor
    """int32: the sampled tokens."""
    logprobs_BN: Tensor
    """fp32: log-probability of each under the distribution that it was drawn from."""
    token_B: Tensor
    """int64: the token just drawn."""
    logprob_B: Tensor
    """fp32: its log-probability."""

    @staticmethod
    def empty(rows: int, pages: int, tokens: int, device: torch.device) -> Rows:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Rows(
            next_B=zeros(rows, dtype=torch.int64),
            position_B=zeros(rows, dtype=torch.int32),
            seed_B=zeros(rows, dtype=torch.int64),
            drawn_B=zeros(rows, dtype=torch.int32),
            budget_B=zeros(rows, dtype=torch.int32),
            temperature_B=torch.ones(rows, dtype=torch.float32, device=device),
            ignore_B=zeros(rows, dtype=torch.int8),
            done_B=torch.ones(rows, dtype=torch.int8, device=device),
            table_BS=zeros(rows, pages, dtype=torch.int32),
            ids_BN=zeros(rows, tokens, dtype=torch.int32),
            logprobs_BN=zeros(rows, tokens, dtype=torch.float32),
            token_B=zeros(rows, dtype=torch.int64),
            logprob_B=zeros(rows, dtype=torch.float32),
        )

    def fits(self, pages: int, tokens: int) -> bool:
        return self.table_BS.shape[1] >= pages and self.ids_BN.shape[1] >= tokens

    def part(self, place: slice) -> Rows:
        """Return views of some rows."""
        return Rows(*(getattr(self, field.name)[place] for field in fields(self)))

    def keep(self, rows: Sequence[int]) -> None:
        """Move the rows of these indices, in this order, to the front; the rows after them become inactive."""
        device = self.next_B.device
        order = torch.tensor(rows, dtype=torch.int64, device=device)
        for field in fields(self):
            tensor: Tensor = getattr(self, field.name)
            tensor[: len(rows)] = tensor[order]
        self.rest(len(rows))

    def rest(self, first: int) -> None:
        """Make rows from `first` on inactive: they write to page 0 and change nothing."""
        self.done_B[first:] = 1
        self.position_B[first:] = 0
        self.table_BS[first:] = 0


class PageCache:
    """Keys and values, [pages, K, P, D] per layer. Page 0 belongs to inactive rows."""

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers, self.heads, self.size = layers, heads, size
        self._dtype, self.device = dtype, device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.anchor = torch.zeros(16, dtype=dtype, device=device)
        self.offsets = torch.zeros(2 * layers, dtype=torch.int64, device=device)
        """Elements from the anchor to keys and values, layer by layer: kernels find them in this way, and the cache may move."""
        self.arrived = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        """Parts that are there of the attention of each row and head: a kernel counts them, and leaves 0."""
        self._free: list[int] = []
        self._owners: Counter[int] = Counter()
        """Number of owners of each page that is not free."""

    @property
    def pages(self) -> int:
        """Number of pages for sequences."""
        return self.keys[0].shape[0] - 1 if self.keys else 0

    @property
    def bytes_per_page(self) -> int:
        return 2 * self.layers * self.heads * PAGE * self.size * self._dtype.itemsize

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, pages: int) -> None:
        """Make room for `pages` pages and page 0. What is there stays; of an enlarged layer only one is there twice at a time."""
        held = self.pages
        if self.keys and pages <= held:
            return
        shape = (pages + 1, self.heads, PAGE, self.size)
        for tensors in (self.keys, self.values):
            for layer in range(self.layers):
                # Kernels mask invisible entries; only page 0 is read before anything was written to it.
                larger = torch.empty(shape, dtype=self._dtype, device=self.device)
                larger[0].zero_()
                if layer < len(tensors):
                    larger[: held + 1] = tensors[layer]
                    tensors[layer] = larger
                else:
                    tensors.append(larger)
        pairs = [t for pair in zip(self.keys, self.values, strict=True) for t in pair]
        distances = [(t.data_ptr() - self.anchor.data_ptr()) // self._dtype.itemsize for t in pairs]
        self.offsets.copy_(torch.tensor(distances, dtype=torch.int64))
        self._free = [*range(pages, held, -1), *self._free]

    def release(self) -> None:
        """Free the memory."""
        self.keys, self.values, self._free = [], [], []
        self._owners.clear()

    def take(self, pages: int) -> list[int]:
        """Return free pages, which have one owner then."""
        taken = [self._free.pop() for _ in range(pages)]
        return self.share(taken)

    def share(self, pages: Sequence[int]) -> list[int]:
        """Return the same pages for one more owner, who may not write to them."""
        self._owners.update(pages)
        return list(pages)

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back from one owner; those without another are free."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} was given back twice"
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                self._free.append(page)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages in every layer."""
        source_X = torch.tensor(source, dtype=torch.int64, device=self.device)
        target_X = torch.tensor(target, dtype=torch.int64, device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor[target_X] = tensor[source_X]
