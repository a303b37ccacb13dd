"""The decode step: computes the next token of each row. On a GPU it is captured as one CUDA graph for each batch size.

Legend: B rows, V vocabulary, X features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.models import exact
from lockstep.models.heads import Head
from lockstep.rollout.paged.fused import FusedDecoder
from lockstep.rollout.paged.layouts import PagedDecode
from lockstep.rollout.paged.ops import Ops
from lockstep.rollout.paged.state import PROGRAMS, PageCache, Rows

log = logging.getLogger(__name__)

ROWS_STEP = 32
"""From this many rows on, captured numbers of rows are multiples of it; below it, powers of two."""


class DecodeStep:
    """A step of some rows: `forward` computes their logits, `sample` also draws from them. Both change `rows` in place."""

    def __init__(self, decoder: Any, fused: FusedDecoder | None, head: Head, cache: PageCache, ops: Ops) -> None:
        self._decoder, self._fused, self._head, self._cache, self._ops = decoder, fused, head, cache, ops
        self._capturing = head.weight_VH.device.type == "cuda"
        self._numeric = ""
        self._graphs: dict[tuple[str, str, int], Callable[[], None]] = {}
        self._pool: Any = None
        self.logits_BV = torch.empty(0)

    def use(self, numeric: str, fused: FusedDecoder | None) -> None:
        """Run this decoder, which computes in `numeric`, from now on; steps captured for other numerics are kept."""
        self._numeric, self._fused = numeric, fused

    def prepare(self, rows: Rows, stops_X: Tensor) -> None:
        """Use these rows from now on; steps captured for others are dropped."""
        self._rows, self._stops_X = rows, stops_X
        weight = self._head.weight_VH
        self.logits_BV = torch.empty(len(rows.next_B), weight.shape[0], dtype=weight.dtype, device=weight.device)
        self.forget()

    def forget(self) -> None:
        """Drop captured graphs: an address or a constant in them is no longer valid."""
        self._graphs.clear()
        self._pool = None

    @torch.no_grad()
    def forward(self, count: int) -> Tensor:
        """Feed the next token of the first `count` rows; returns logits [B, V] of the token after it."""
        self._run("forward", count, self._forward)
        return self.logits_BV[:count]

    @torch.no_grad()
    def sample(self, count: int) -> None:
        """Feed the next token of the first `count` rows; draw the token after it, and store it."""
        self._run("sample", count, self._sample)

    def _forward(self, count: int) -> None:
        splits = self._splits(count)
        if self._fused is not None:
            hidden_BX = self._fused(count, self._ops, self._rows, self._cache, splits)
        else:
            layout = PagedDecode(self._ops, self._rows, self._cache, splits)
            hidden_BX = self._decoder(
                input_ids=self._rows.next_B[None, :count],
                position_ids=self._rows.position_B[None, :count].long(),
                use_cache=False,
                layout=layout,
            ).last_hidden_state[0]
        write_logits(self._head, hidden_BX, self.logits_BV[:count])

    def _sample(self, count: int) -> None:
        self._forward(count)
        self._ops.draw(self.logits_BV[:count], self._rows)
        self._ops.advance(self._rows, count, self._stops_X)

    def _splits(self, count: int) -> int:
        wanted = -(-PROGRAMS // (count * self._cache.heads))
        most = self._rows.table_BS.shape[1]
        return max(1, min(1 << (wanted - 1).bit_length(), 1 << (most - 1).bit_length() if most > 1 else 1, 32))

    # --- capture --------------------------------------------------------------------------------------------------
    def _run(self, name: str, count: int, run: Callable[[int], None]) -> None:
        if not self._capturing:
            run(count)
            return
        key = (name, self._numeric, count)
        if key not in self._graphs:
            self._graphs[key] = self._captured(name, count, run)
        self._graphs[key]()

    def _captured(self, name: str, count: int, run: Callable[[int], None]) -> Callable[[], None]:
        """Return a replay of one run; its warm-up runs change nothing, because every row is inactive meanwhile."""
        done_B = self._rows.done_B.clone()
        self._rows.done_B.fill_(1)
        try:
            return self._capture(count, run)
        finally:
            self._rows.done_B.copy_(done_B)

    def _capture(self, count: int, run: Callable[[int], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(count)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                run(count)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a model whose forward pass reads a number from the device
            log.warning("decoding runs without CUDA graphs, which is slower: %s", str(error).splitlines()[0])
            self._capturing = False
            self._graphs.clear()
            torch.cuda.synchronize()
            return lambda: run(count)
        return graph.replay


def write_logits(head: Head, hidden_BX: Tensor, logits_BV: Tensor) -> None:
    """Write the head's logits of hidden states to `logits_BV` in its precision."""
    if exact.enabled():
        exact.product_into(logits_BV, hidden_BX, head.weight_VH)
    elif head.bias_V is None and head.softcap is None and head.scale == 1.0:
        torch.mm(hidden_BX, head.weight_VH.T, out=logits_BV)
    else:
        logits_BV.copy_(head.logits(hidden_BX))


def captured_rows(count: int, most: int) -> int:
    """Return the number of rows that a step runs for `count` sequences: only a few different ones, because each is captured."""
    size = 1 << max(3, (count - 1).bit_length()) if count <= ROWS_STEP else -(-count // ROWS_STEP) * ROWS_STEP
    return min(size, most)
