"""Layouts of the tokens in a forward pass of the paged engine: the prompts in prefill, one new token per row in decoding.

Legend: T tokens of the packed stream, B rows (replies being sampled), H query heads, K key/value heads, D head size, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.models import exact
from lockstep.models.attention import AttentionKind, causal_mask, dense_attention
from lockstep.models.ordered import Piece as Stretch
from lockstep.models.ordered import tiles_of
from lockstep.models.varlen import Spans, varlen_attention, varlen_serves
from lockstep.rollout.paged.ops import Ops
from lockstep.rollout.paged.state import PAGE, PageCache, Rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `end` of a prompt whose keys and values go to `pages`."""

    pages: Sequence[int]
    start: int
    end: int


class PagedPrefill:
    """Pieces of prompts end to end, then padding; each attends to the earlier content of its pages and to itself."""

    def __init__(self, cache: PageCache, pieces: Sequence[Piece], device: torch.device) -> None:
        self._cache, self._pieces = cache, pieces
        self._own = _places([(piece.pages, range(piece.start, piece.end)) for piece in pieces], device)
        """Pages of the tokens, and their places in these."""
        self._all: tuple[Tensor, Tensor] | None = None
        if any(piece.start for piece in pieces):
            self._all = _places([(piece.pages, range(piece.end)) for piece in pieces], device)
        lengths, ends = [piece.end - piece.start for piece in pieces], [piece.end for piece in pieces]
        self.tokens = sum(lengths)
        self._queries, self._keys = Spans.of(lengths, device), Spans.of(ends, device)
        starts = zip(accumulate(lengths, initial=0), accumulate(ends, initial=0), pieces, strict=False)
        self._tiles = tiles_of([Stretch(at, p.end - p.start, p.start, keys=keys) for at, keys, p in starts], device)

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        query_THD, key_TKD, value_TKD = (x[:, : self.tokens].transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        page_T, offset_T = self._own
        keys[page_T, :, offset_T] = key_TKD
        values[page_T, :, offset_T] = value_TKD
        if self._all is not None:
            page_S, offset_S = self._all
            key_TKD, value_TKD = keys[page_S, :, offset_S], values[page_S, :, offset_S]
        if exact.enabled():
            from lockstep.models.ordered_attention import stream_attention  # Triton

            given = query_THD.contiguous(), key_TKD.contiguous(), value_TKD.contiguous()
            output_THD, _ = stream_attention(*given, self._tiles, kind.scale, kind.window, kind.sinks_H)
        elif varlen_serves(query_THD, kind):
            output_THD = varlen_attention(query_THD, key_TKD, value_TKD, self._queries, self._keys, kind)
        else:
            output_THD = self._dense(query_THD, key_TKD, value_TKD, kind)
        padding = query_HTD.shape[1] - self.tokens
        return nn.functional.pad(output_THD, (0, 0, 0, 0, 0, padding)) if padding else output_THD

    def _dense(self, query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, kind: AttentionKind) -> Tensor:
        outputs, query_at, key_at = [], 0, 0
        for piece in self._pieces:
            length = piece.end - piece.start
            query = query_THD[query_at : query_at + length].transpose(0, 1)[None]
            key, value = (x[key_at : key_at + piece.end].transpose(0, 1)[None] for x in (key_SKD, value_SKD))
            mask = causal_mask(length, piece.end, kind.window, query.device) if piece.start else None
            outputs.append(dense_attention(query, key, value, mask, kind)[0].transpose(0, 1))
            query_at, key_at = query_at + length, key_at + piece.end
        return torch.cat(outputs)


class PagedDecode:
    """One new token for each of the first rows."""

    def __init__(self, ops: Ops, rows: Rows, cache: PageCache, splits: int) -> None:
        self._ops, self._rows, self._cache, self._splits = ops, rows, cache, splits

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        heads = query_HTD, key_KTD, value_KTD
        output_BX = self._ops.attend(heads, self._rows, self._cache, layer, kind, self._splits)
        return output_BX.view(output_BX.shape[0], query_HTD.shape[0], query_HTD.shape[2])


def _places(spans: Sequence[tuple[Sequence[int], range]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the pages of tokens, span by span, and the places in these."""
    pages, places = [], []
    for owned, span in spans:
        token_T = np.arange(span.start, span.stop)
        pages.append(np.asarray(owned, dtype=np.int64)[token_T // PAGE])
        places.append(token_T % PAGE)
    page_T, place_T = torch.from_numpy(np.stack([np.concatenate(pages), np.concatenate(places)])).to(device)
    return page_T, place_T
