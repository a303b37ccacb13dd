"""The key-value cache and recurrent states of the sequences being decoded, in one slot each, and the layouts that use them.

Legend: B slots, K key/value heads, D size of a key, Dv of a value, S cached tokens, T tokens of the stream, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.models.attention import AttentionKind, causal_mask, dense_attention, wide_product
from lockstep.models.states import Run, State

STREAM_MULTIPLE = 16
"""Streams are padded to a multiple of this many tokens. Matrix products of fewer rows, or of an odd number, use other code
paths in the CPU's libraries and round differently; at multiples of 16 a row's bits do not depend on the number of rows.
"""
QUERY_BLOCK = 64
"""Prompts attend in blocks of this many positions, counted from the start of the prompt, however they were cut: a token's bits
do not depend on how much of its prompt was processed before.
"""
KEY_BLOCKS = {torch.float32: 128}
KEY_BLOCK = 256
"""Probabilities × values are summed in blocks of this many keys, so that the order of summation does not depend on the length
of the longest neighbour. In fp32 the CPU's libraries split longer sums at places that depend on their length.
"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A processed prompt."""

    tokens: int
    pairs: Mapping[int, tuple[Tensor, Tensor]]
    """Keys [K, S, D] and values [K, S, Dv] of each layer with attention."""
    states: Mapping[int, State] = field(default_factory=dict)
    """Tensors [1, …] that each layer with a state holds behind the last token."""

    @property
    def bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.numel() * tensor.element_size() for pair in self.pairs.values() for tensor in pair)

    def begin(self, tokens: int) -> Prefix:
        """Return its beginning, of a model without states."""
        return Prefix(
            tokens, {layer: (key[:, :tokens], value[:, :tokens]) for layer, (key, value) in self.pairs.items()}
        )


class Slots:
    """Keys [B, K, S, D] and values [B, K, S, Dv] of each layer, and states [B, …]. Slots in use are always the first ones.

    Each layer has sizes of its own: they are those of the first prompt that is written.
    """

    def __init__(self, slots: int) -> None:
        self._slots, self.capacity = slots, 0
        """Number of slots, and of tokens that one can hold."""
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, dict[tuple[str, int], Tensor]] = {}

    def reserve(self, tokens: int, *, idle: bool) -> None:
        """Make room for sequences of `tokens`: keep the present content or, when `idle`, allocate exactly this size."""
        size = -(-tokens // STREAM_MULTIPLE) * STREAM_MULTIPLE
        if idle and size != self.capacity:
            self.release()
        if size <= self.capacity:
            return
        # Zeros, not garbage: masked keys have probability 0, and 0 × NaN would still be NaN.
        more = (0, 0, 0, size - self.capacity)
        self.pairs = {layer: (pad(key, more), pad(value, more)) for layer, (key, value) in self.pairs.items()}
        self.capacity = size

    def fill(self, slots: list[int], prefix: Prefix) -> None:
        """Write a prompt into some slots. Nothing of what they held before is left where it could be read."""
        for layer, pair in prefix.pairs.items():
            if layer not in self.pairs:
                key, value = (t.new_zeros(self._slots, t.shape[0], self.capacity, t.shape[2]) for t in pair)
                self.pairs[layer] = key, value
            for kept, new in zip(self.pairs[layer], pair, strict=True):
                kept[slots, :, : prefix.tokens] = new
            # Masked values have weight 0, and 0 × NaN of an earlier sequence is NaN.
            self.pairs[layer][1][slots, :, prefix.tokens :] = 0
        for layer, state in prefix.states.items():
            mine = self.states.setdefault(layer, {})
            for part, tensor in state.items():
                if part not in mine:
                    mine[part] = tensor.new_zeros(self._slots, *tensor.shape[1:])
                mine[part][slots] = tensor

    def move(self, source: int, target: int, tokens: int) -> None:
        for key, value in self.pairs.values():
            for kept in (key, value):
                kept[target, :, :tokens] = kept[source, :, :tokens]
            value[target, :, tokens:] = 0
        for state in self.states.values():
            for tensor in state.values():
                tensor[target] = tensor[source]

    def release(self) -> None:
        """Free the memory."""
        self.capacity, self.pairs, self.states = 0, {}, {}


@dataclass(slots=True)
class PrefillLayout:
    """Chunks end to end, each attending to its own prefix and itself; keeps their keys, values and states.

    Layers run chunk by chunk, attention block by block: the same token gives the same bits whatever else is processed with it,
    and, without states, wherever its chunk began.
    """

    lengths: list[int]
    prefixes: list[Prefix | None]
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: dict[int, list[State]] = field(default_factory=dict)

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        assert layer not in self.kept, "layers run once each"
        self.kept[layer] = key_KTD, value_KTD
        heads, tokens = query_HTD.shape[:2]
        output_THD = query_HTD.new_zeros(tokens, heads, value_KTD.shape[-1])
        for span, prefix in self._chunks():
            own = query_HTD[:, span], key_KTD[:, span], value_KTD[:, span]
            before = None if prefix is None else prefix.pairs[layer]
            output_THD[span] = _in_blocks(*own, before, kind).transpose(0, 1)
        return output_THD

    def mix(self, layer: int, hidden_TH: Tensor, run: Run) -> Tensor:
        assert layer not in self.states, "layers run once each"
        output_TH, self.states[layer] = torch.zeros_like(hidden_TH), []
        for span, prefix in self._chunks():
            output_1TH, state = run(hidden_TH[None, span], None if prefix is None else prefix.states[layer])
            output_TH[span] = output_1TH[0]
            self.states[layer].append(state)
        return output_TH

    def processed(self) -> list[Prefix]:
        """Return every chunk with its prefix before it, in order."""
        result = []
        for place, (span, prefix) in enumerate(self._chunks()):
            pairs = {}
            for layer, pair in self.kept.items():
                own = [tensor[:, span] for tensor in pair]
                if prefix is not None:
                    own = [torch.cat(both, 1) for both in zip(prefix.pairs[layer], own, strict=True)]
                pairs[layer] = own[0].clone(), own[1].clone()
            tokens = span.stop - span.start + (prefix.tokens if prefix is not None else 0)
            result.append(Prefix(tokens, pairs, {layer: states[place] for layer, states in self.states.items()}))
        return result

    def _chunks(self) -> Iterator[tuple[slice, Prefix | None]]:
        start = 0
        for length, prefix in zip(self.lengths, self.prefixes, strict=True):
            yield slice(start, start + length), prefix
            start += length


def _in_blocks(
    query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, before: tuple[Tensor, Tensor] | None, kind: AttentionKind
) -> Tensor:
    """Compute attention [H, T, D] of a chunk after the keys and values `before` it. All blocks have whole shapes: rows and keys
    that are missing are zeros, which no token sees."""
    first = 0 if before is None else before[0].shape[1]
    end = first + query_HTD.shape[1]
    keys_KSD, values_KSD = (
        pad(torch.cat([*([] if before is None else [before[i]]), own], 1), (0, 0, 0, -end % QUERY_BLOCK))
        for i, own in enumerate((key_KTD, value_KTD))
    )
    output_HTD = query_HTD.new_empty(*query_HTD.shape[:2], value_KTD.shape[-1])
    for block in range(first // QUERY_BLOCK * QUERY_BLOCK, end, QUERY_BLOCK):
        low, high, seen = max(block, first), min(block + QUERY_BLOCK, end), block + QUERY_BLOCK
        query_HQD = query_HTD.new_zeros(query_HTD.shape[0], QUERY_BLOCK, query_HTD.shape[2])
        query_HQD[:, low - block : high - block] = query_HTD[:, low - first : high - first]
        key, value = keys_KSD[None, :, :seen].contiguous(), values_KSD[None, :, :seen].contiguous()
        mask = causal_mask(QUERY_BLOCK, seen, kind.window, query_HTD.device)
        found_HQD = dense_attention(query_HQD[None], key, value, mask, kind)[0]
        output_HTD[:, low - first : high - first] = found_HQD[:, low - block : high - block]
    return output_HTD


class DecodeLayout:
    """One new token for each of the first `rows` slots, then padding rows that are not read."""

    def __init__(self, slots: Slots, positions_B: Tensor, longest: int, rows: int) -> None:
        self._slots, self._rows = slots, rows
        # A part of the slots is copied before it is multiplied, the whole is not: reading some masked keys is cheaper.
        needed = -(-longest // STREAM_MULTIPLE) * STREAM_MULTIPLE
        self._keys = needed if 2 * needed < slots.capacity else slots.capacity
        self._positions_B = positions_B
        self._slot_B = torch.arange(rows, device=positions_B.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        rows, (heads, tokens, size) = self._rows, query_HTD.shape
        keys_BKSD, values_BKSD = self._slots.pairs[layer]
        keys_BKSD[self._slot_B, :, self._positions_B] = key_KTD[:, :rows].transpose(0, 1)
        values_BKSD[self._slot_B, :, self._positions_B] = value_KTD[:, :rows].transpose(0, 1)
        keys_BKSD, values_BKSD = keys_BKSD[:rows, :, : self._keys], values_BKSD[:rows, :, : self._keys]
        kv_heads = keys_BKSD.shape[1]
        query_BKGD = query_HTD[:, :rows].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, size)
        scores_BKGS = wide_product(query_BKGD, keys_BKSD.transpose(-1, -2)) * kind.scale
        if kind.softcap is not None:
            scores_BKGS = kind.softcap * torch.tanh(scores_BKGS / kind.softcap)
        scores_BKGS.masked_fill_(~self._mask(kind.window), -torch.inf)
        if kind.sinks_H is None:
            probs_BKGS = scores_BKGS.softmax(-1)
        else:
            sinks = kind.sinks_H.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
            probs_BKGS = torch.cat([scores_BKGS, sinks], -1).softmax(-1)[..., :-1]
        size = values_BKSD.shape[-1]
        output_THD = query_HTD.new_zeros(tokens, heads, size)
        output_THD[:rows] = _blocked_sum(probs_BKGS, values_BKSD).reshape(rows, heads, size)
        return output_THD

    def mix(self, layer: int, hidden_TH: Tensor, run: Run) -> Tensor:
        """Run a layer on one token a row. Padding rows, whose states are zeros, keep a row's bits free of their number."""
        kept, rows, padding = self._slots.states[layer], self._rows, hidden_TH.shape[0] - self._rows
        none = {key: tensor.new_zeros(padding, *tensor.shape[1:]) for key, tensor in kept.items()}
        state = {key: torch.cat([tensor[:rows], none[key]]) for key, tensor in kept.items()}
        output_T1H, after = run(hidden_TH[:, None], state)
        for key, tensor in after.items():
            kept[key][:rows] = tensor[:rows]
        return output_T1H[:, 0]

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
    keys, block = probs_BKGS.shape[-1], KEY_BLOCKS.get(values_BKSD.dtype, KEY_BLOCK)
    total = wide_product(probs_BKGS[..., :block], values_BKSD[..., :block, :])
    for start in range(block, keys, block):
        span = slice(start, start + block)
        total = total + wide_product(probs_BKGS[..., span], values_BKSD[..., span, :])
    return total
