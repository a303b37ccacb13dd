"""Keys and values of the sequences being decoded, one slot each, and the token layouts that read and write them.

Legend: L layers, B slots, K key/value heads, D head size, S cached tokens, T tokens of the stream, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.models.attention import AttentionKind, causal_mask, dense_attention

STREAM_MULTIPLE = 16
"""Streams are padded to a multiple of this many tokens. Matrix products of fewer rows, or of an odd number, use other code
paths in the CPU's libraries and round differently; at multiples of 16 a row's bits do not depend on the number of rows.
"""
KEY_BLOCKS = {torch.float32: 128}
KEY_BLOCK = 256
"""Probabilities × values are summed in blocks of this many keys, so that the order of summation does not depend on the length
of the longest neighbour. In fp32 the CPU's libraries split longer sums at places that depend on their length.
"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A processed prompt: its keys and values [2, L, K, S, D]."""

    cache: Tensor

    @property
    def tokens(self) -> int:
        return int(self.cache.shape[3])


class Slots:
    """The cache [2, L, B, K, S, D] (keys, then values). Slots in use are always the first `used`."""

    def __init__(
        self, layers: int, slots: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (2, layers, slots, heads, 0, size)
        self._dtype, self._device = dtype, device
        self.cache = torch.zeros(self._shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Number of tokens that a slot can hold."""
        return int(self.cache.shape[4])

    def reserve(self, tokens: int, *, idle: bool) -> None:
        """Make room for sequences of `tokens`: keep the present content or, when `idle`, allocate exactly this size."""
        size = -(-tokens // STREAM_MULTIPLE) * STREAM_MULTIPLE
        if idle and size != self.capacity:
            self.release()
        if size <= self.capacity:
            return
        # Zeros, not garbage: masked keys have probability 0, and 0 × NaN would still be NaN.
        grown = torch.zeros((*self._shape[:4], size, self._shape[5]), dtype=self._dtype, device=self._device)
        grown[..., : self.capacity, :] = self.cache
        self.cache = grown

    def fill(self, slots: list[int], prefix: Prefix) -> None:
        self.cache[:, :, slots, :, : prefix.tokens] = prefix.cache[:, :, None]
        self.cache[1][:, slots, :, prefix.tokens :] = (
            0  # masked values have weight 0, and 0 × NaN of an earlier sequence is NaN
        )

    def move(self, source: int, target: int, tokens: int) -> None:
        self.cache[:, :, target, :, :tokens] = self.cache[:, :, source, :, :tokens]
        self.cache[1][:, target, :, tokens:] = 0

    def release(self) -> None:
        """Free the memory."""
        self.cache = torch.zeros(self._shape, dtype=self._dtype, device=self._device)


@dataclass(slots=True)
class PrefillLayout:
    """Chunks end to end, each attending to its own prefix and itself; keeps their keys and values.

    Attention runs chunk by chunk: the same chunk gives the same bits whatever else is processed with it.
    """

    lengths: list[int]
    prefixes: list[Prefix | None]
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        assert layer == len(self.kept), "layers run in order, once each"
        self.kept.append((key_KTD, value_KTD))
        output_THD = torch.zeros_like(query_HTD).transpose(0, 1)
        start = 0
        for length, prefix in zip(self.lengths, self.prefixes, strict=True):
            span = slice(start, start + length)
            query, key, value = (x[None, :, span] for x in (query_HTD, key_KTD, value_KTD))
            mask = None
            if prefix is not None:
                key = torch.cat([prefix.cache[0, layer][None], key], 2)
                value = torch.cat([prefix.cache[1, layer][None], value], 2)
                mask = causal_mask(length, prefix.tokens + length, kind.window, query.device)
            output_THD[span] = dense_attention(query, key, value, mask, kind)[0].transpose(0, 1)
            start += length
        return output_THD

    def processed(self) -> list[Prefix]:
        """Return every chunk with its prefix before it, in order."""
        cache_2LKTD = torch.stack([torch.stack([pair[i] for pair in self.kept]) for i in (0, 1)])
        result, start = [], 0
        for length, prefix in zip(self.lengths, self.prefixes, strict=True):
            own = cache_2LKTD[:, :, :, start : start + length]
            result.append(Prefix(own.clone() if prefix is None else torch.cat([prefix.cache, own], 3)))
            start += length
        return result


class DecodeLayout:
    """One new token for each of the first `rows` slots, then padding rows that are not read."""

    def __init__(self, slots: Slots, positions_B: Tensor, longest: int, rows: int) -> None:
        self._cache, self._rows = slots.cache, rows
        # A part of the slots is copied before it is multiplied, the whole is not: reading some masked keys is cheaper.
        needed = -(-longest // STREAM_MULTIPLE) * STREAM_MULTIPLE
        self._keys = needed if 2 * needed < slots.capacity else slots.capacity
        self._positions_B = positions_B
        self._slot_B = torch.arange(rows, device=positions_B.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        rows, (heads, tokens, size) = self._rows, query_HTD.shape
        keys_BKSD, values_BKSD = self._cache[0, layer], self._cache[1, layer]
        keys_BKSD[self._slot_B, :, self._positions_B] = key_KTD[:, :rows].transpose(0, 1)
        values_BKSD[self._slot_B, :, self._positions_B] = value_KTD[:, :rows].transpose(0, 1)
        keys_BKSD, values_BKSD = keys_BKSD[:rows, :, : self._keys], values_BKSD[:rows, :, : self._keys]
        kv_heads = keys_BKSD.shape[1]
        query_BKGD = query_HTD[:, :rows].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, size)
        scores_BKGS = torch.matmul(query_BKGD, keys_BKSD.transpose(-1, -2)).float() * kind.scale
        if kind.softcap is not None:
            scores_BKGS = kind.softcap * torch.tanh(scores_BKGS / kind.softcap)
        scores_BKGS.masked_fill_(~self._mask(kind.window), -torch.inf)
        if kind.sinks_H is None:
            probs_BKGS = scores_BKGS.softmax(-1)
        else:
            sinks = kind.sinks_H.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
            probs_BKGS = torch.cat([scores_BKGS, sinks], -1).softmax(-1)[..., :-1]
        output_THD = query_HTD.new_zeros(tokens, heads, size)
        output_THD[:rows] = _blocked_sum(probs_BKGS.to(query_HTD.dtype), values_BKSD).reshape(rows, heads, size)
        return output_THD

    def _mask(self, window: int | None) -> Tensor:
        """Return True where a key is visible, [B, 1, 1, S]."""
        if window not in self._masks:
            keys_S = torch.arange(self._keys, device=self._positions_B.device)
            seen_BS = keys_S <= self._positions_B[:, None]
            if window is not None:
                seen_BS &= keys_S > self._positions_B[:, None] - window
            self._masks[window] = seen_BS[:, None, None]
        return self._masks[window]


def _blocked_sum(probs_BKGS: Tensor, values_BKSD: Tensor) -> Tensor:
    keys, block = probs_BKGS.shape[-1], KEY_BLOCKS.get(probs_BKGS.dtype, KEY_BLOCK)
    total = torch.matmul(probs_BKGS[..., :block], values_BKSD[..., :block, :])
    for start in range(block, keys, block):
        span = slice(start, start + block)
        total = total + torch.matmul(probs_BKGS[..., span], values_BKSD[..., span, :])
    return total
