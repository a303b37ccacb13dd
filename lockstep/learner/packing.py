"""From sequences to token streams: micro-batches by a token budget, without padding, a group's prompt once.

Legend: T tokens of the stream, R response tokens with loss, N sequences, G responses of one prompt, P prompt tokens,
H query heads, K key/value heads, D head size, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import LearnerError
from lockstep.models.attention import AttentionKind, causal_mask, dense_attention
from lockstep.types import TokenIds, TrainSequence


@dataclass(frozen=True, slots=True)
class Branch:
    """A prompt and the responses that continue it. Response tokens are those fed to the model: all but the last sampled one."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


class PackedLayout:
    """A root that all sequences begin with, then branches end to end: prompt, response, response, …

    A response sees root, its prompt and itself; a prompt sees root and itself.
    """

    def __init__(self, branches: Sequence[Branch], device: torch.device, root: int = 0) -> None:
        self._branches, self._root = branches, root
        self._gathers = [_Gather.of(branch.responses, device) for branch in branches]

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        root = slice(0, self._root)
        root_key, root_value = key_KTD[None, :, root], value_KTD[None, :, root]
        pieces_THD: list[Tensor] = []
        if self._root:
            pieces_THD.append(
                dense_attention(query_HTD[None, :, root], root_key, root_value, None, kind)[0].transpose(0, 1)
            )
        start = self._root
        for branch, gather in zip(self._branches, self._gathers, strict=True):
            prompt, tail = slice(start, start + branch.prompt), slice(start + branch.prompt, start + branch.tokens)
            start += branch.tokens
            query, key, value = (x[None, :, prompt] for x in (query_HTD, key_KTD, value_KTD))
            if self._root:
                key, value = torch.cat([root_key, key], 2), torch.cat([root_value, value], 2)
            mask = causal_mask(branch.prompt, key.shape[2], kind.window, key.device) if self._root else None
            pieces_THD.append(dense_attention(query, key, value, mask, kind)[0].transpose(0, 1))
            if not gather.longest:
                continue
            count = len(branch.responses)
            keys_GKSD = torch.cat([key.expand(count, -1, -1, -1), gather.pad(key_KTD[:, tail])], 2)
            values_GKSD = torch.cat([value.expand(count, -1, -1, -1), gather.pad(value_KTD[:, tail])], 2)
            # One mask serves all responses: their padding sits at the end, where causality already hides it.
            mask = causal_mask(gather.longest, keys_GKSD.shape[2], kind.window, key.device)
            output_GHQD = dense_attention(gather.pad(query_HTD[:, tail]), keys_GKSD, values_GKSD, mask, kind)
            pieces_THD.append(gather.unpad(output_GHQD))
        if start < query_HTD.shape[1]:
            pieces_THD.append(query_HTD.new_zeros(query_HTD.shape[1] - start, query_HTD.shape[0], query_HTD.shape[2]))
        return torch.cat(pieces_THD)


@dataclass(frozen=True, slots=True)
class _Gather:
    """Between responses end to end [X, T, D] and one padded row each [G, X, longest, D]."""

    count: int
    longest: int
    equal: bool
    into: Tensor
    back: Tensor

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device) -> _Gather:
        longest = max(lengths, default=0)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        into = [s + min(j, n - 1) if n else 0 for s, n in zip(starts, lengths, strict=True) for j in range(longest)]
        back = [row * longest + j for row, n in enumerate(lengths) for j in range(n)]
        equal = all(n == longest for n in lengths)
        return _Gather(
            len(lengths), longest, equal, torch.tensor(into, device=device), torch.tensor(back, device=device)
        )

    def pad(self, flat_XTD: Tensor) -> Tensor:
        rows_XTD = flat_XTD if self.equal else flat_XTD.index_select(1, self.into)
        padded_XGQD: Tensor = rows_XTD.unflatten(1, (self.count, self.longest))
        return padded_XGQD.transpose(0, 1)

    def unpad(self, padded_GXQD: Tensor) -> Tensor:
        flat_TXD = padded_GXQD.transpose(1, 2).flatten(0, 1)
        return flat_TXD if self.equal else flat_TXD.index_select(0, self.back)


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch, ready for the model. Per-token arrays hold only tokens with loss, sequence by sequence."""

    ids_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    rows_R: Tensor
    """Stream positions whose hidden states predict the tokens with loss."""
    targets_R: Tensor
    sequence_R: Tensor
    """Index into the micro-batch's sequences."""
    order: tuple[int, ...]
    """The micro-batch's sequences, as indices into what was packed."""

    @property
    def tokens(self) -> int:
        return int(self.ids_T.shape[0])


def microbatches(
    sequences: Sequence[TrainSequence], budget: int, *, share_prompts: bool, prefix: int = 0
) -> list[list[int]]:
    """Split sequences into micro-batches of at most `budget` tokens each; a single longer sequence gets its own.

    Sequences of one group stay together where they fit, so that their prompt is processed once.
    """
    prefix = prefix if share_prompts else 0
    chunks: list[list[int]] = []
    tokens, group = 0, -1
    for index in sorted(range(len(sequences)), key=lambda i: sequences[i].group):
        sequence = sequences[index]
        response = _fed(sequence)
        whole = response + len(sequence.prompt_ids) - prefix
        cost = response if share_prompts and sequence.group == group else whole
        if not chunks or tokens + cost > budget:
            chunks.append([])
            tokens, cost = prefix, whole
        chunks[-1].append(index)
        tokens, group = tokens + cost, sequence.group
    return chunks


def pack(
    sequences: Sequence[TrainSequence],
    chosen: Sequence[int],
    *,
    share_prompts: bool,
    device: torch.device,
    prefix: int = 0,
) -> Packed:
    """The stream of one micro-batch: `chosen` are indices into `sequences`, neighbours of one group share their prompt.

    The first `prefix` tokens, which all of them have, are processed once. Raises LearnerError if they differ.
    """
    root = sequences[chosen[0]].prompt_ids[:prefix] if share_prompts else ()
    ids: list[int] = list(root)
    positions: list[int] = list(range(len(root)))
    rows: list[int] = []
    targets: list[int] = []
    owner: list[int] = []
    branches: list[tuple[int, list[int]]] = []
    last_row, group = 0, None
    for place, index in enumerate(chosen):
        sequence = sequences[index]
        prompt, fed = len(sequence.prompt_ids), _fed(sequence)
        if not (share_prompts and sequence.group == group):
            if sequence.prompt_ids[: len(root)] != root or prompt <= len(root):
                raise LearnerError(f"sequence {index} does not begin with the {len(root)} tokens that all should share")
            group, branch = sequence.group, (prompt - len(root), list[int]())
            branches.append(branch)
            ids += sequence.prompt_ids[len(root) :]
            positions += range(len(root), prompt)
            last_row = len(ids) - 1
        first = len(ids)
        ids += sequence.ids[:fed]
        positions += range(prompt, prompt + fed)
        branches[-1][1].append(fed)
        for j, (token, trained) in enumerate(zip(sequence.ids, sequence.trained, strict=True)):
            if trained:
                rows.append(last_row if j == 0 else first + j - 1)
                targets.append(token)
                owner.append(place)
    layout = PackedLayout([Branch(prompt, tuple(responses)) for prompt, responses in branches], device, len(root))
    tensors = (
        torch.tensor(values, dtype=torch.int64, device=device) for values in (ids, positions, rows, targets, owner)
    )
    ids_T, positions_T, rows_R, targets_R, sequence_R = tensors
    return Packed(ids_T, positions_T, layout, rows_R, targets_R, sequence_R, tuple(chosen))


def _fed(sequence: TrainSequence) -> int:
    """Response tokens that the model reads: the last one is only predicted."""
    return max(0, len(sequence.ids) - 1)


def as_sequence(ids: TokenIds, group: int) -> TrainSequence:
    """A plain sequence to be scored: one prompt token, every other token with loss."""
    rest = len(ids) - 1
    return TrainSequence(ids[:1], ids[1:], (True,) * rest, (0.0,) * rest, (0.0,) * rest, 0.0, group)
