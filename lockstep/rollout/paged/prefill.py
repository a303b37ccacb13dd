"""Prefill of prompts: many short ones in one forward pass, a long one in several.

Legend: T tokens of the stream, B prompts, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.models import exact
from lockstep.models.heads import Head, token_logprobs
from lockstep.models.host import on_device
from lockstep.rollout.paged.layouts import PagedPrefill, Piece
from lockstep.rollout.paged.scheduler import Prompt
from lockstep.rollout.paged.state import PageCache
from lockstep.rollout.paged.steps import write_logits
from lockstep.types import TokenIds

PREFILL_TOKENS = 16384
"""Tokens processed in one pass; a longer prompt takes several."""
STREAM_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` of a sequence that is stored in `pages`."""

    ids: TokenIds
    pages: Sequence[int]
    start: int
    end: int


class Prefill:
    """The model's own forward pass over spans of tokens, writing their keys and values to the cache."""

    def __init__(self, decoder: Any, head: Head, cache: PageCache) -> None:
        self._decoder, self._head, self._cache = decoder, head, cache
        self._device = head.weight_VH.device

    def prompts(self, prompts: Sequence[Prompt]) -> None:
        """Process prompts from where they are not taken over, and keep the logits after each."""
        batch: list[tuple[Prompt, Span]] = []
        tokens = 0
        for prompt in prompts:
            start = prompt.begun
            while start < len(prompt.ids):
                end = min(len(prompt.ids), start + PREFILL_TOKENS - tokens)
                batch.append((prompt, Span(prompt.ids, prompt.pages, start, end)))
                tokens, start = tokens + end - start, end
                if tokens == PREFILL_TOKENS:
                    self._batch(batch)
                    batch, tokens = [], 0
        if batch:
            self._batch(batch)

    def logprobs(self, spans: Sequence[Span]) -> list[list[float]]:
        """Process spans that begin sequences; returns log-probabilities from the second token to the one after each span."""
        hidden_TH = self._stream(spans)
        targets = [token for span in spans for token in span.ids[1 : span.end + 1]]
        logprobs_T, _ = token_logprobs(self._head, hidden_TH, torch.tensor(targets, device=self._device))
        values, ends = logprobs_T.tolist(), list(accumulate(span.end for span in spans))
        return [values[end - span.end : end] for span, end in zip(spans, ends, strict=True)]

    def _batch(self, batch: Sequence[tuple[Prompt, Span]]) -> None:
        spans = [span for _, span in batch]
        hidden_TH = self._stream(spans)
        last = [end - 1 for end in accumulate(span.end - span.start for span in spans)]
        hidden_BH = hidden_TH[torch.tensor(last, device=self._device)]
        logits_BV = hidden_BH.new_empty(len(batch), self._head.weight_VH.shape[0])
        write_logits(self._head, hidden_BH, logits_BV)
        for (prompt, span), logits_V in zip(batch, logits_BV, strict=True):
            if span.end == len(prompt.ids):
                prompt.logits_V = logits_V

    def _stream(self, spans: Sequence[Span]) -> Tensor:
        """Return hidden states [T, H] of spans of tokens end to end."""
        pieces = [Piece(span.pages, span.start, span.end) for span in spans]
        layout = PagedPrefill(self._cache, pieces, self._device)
        multiple = exact.STREAM_MULTIPLE if exact.enabled() else STREAM_MULTIPLE
        tokens_2T = np.zeros((2, -(-layout.tokens // multiple) * multiple), dtype=np.int64)
        tokens_2T[0, : layout.tokens] = [token for span in spans for token in span.ids[span.start : span.end]]
        tokens_2T[1, : layout.tokens] = np.concatenate([np.arange(span.start, span.end) for span in spans])
        ids_1T, positions_1T = on_device(tokens_2T, self._device).split(1)
        output = self._decoder(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, layout=layout)
        hidden_TH: Tensor = output.last_hidden_state[0, : layout.tokens]
        return hidden_TH
