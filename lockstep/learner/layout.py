"""Says which tokens each token of a packed stream attends to, and computes this attention.

Legend: T tokens of the stream, H query heads, K key/value heads, D head size, G responses of one prompt, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.learner.flash import FLASH, Kernels, Ordered, Part, flash_attention
from lockstep.models import exact
from lockstep.models.attention import AttentionKind, causal_attention
from lockstep.models.ordered import Piece, Tasks, Tiles, tasks_of, tiles_of
from lockstep.models.states import Run, State, rows_of


@dataclass(frozen=True, slots=True)
class Branch:
    """A prompt and the responses that continue it. Response tokens are those fed to the model: all but the last sampled one."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tail(self) -> int:
        """Number of tokens of all its responses."""
        return sum(self.responses)

    @property
    def tokens(self) -> int:
        return self.prompt + self.tail


class PackedLayout:
    """A root that all sequences begin with, then branches: a prompt and its responses. A response attends to root, its prompt
    and itself; a prompt attends to root and itself.

    The stream has each branch's prompt and responses together or, with `prompts_first`, all prompts and then all responses. In
    that order flash attention can take the responses of all branches in one call; branches without response tokens come last.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        device: torch.device,
        root: int = 0,
        *,
        prompts_first: bool = False,
        kernels: Kernels = FLASH,
    ) -> None:
        self._branches, self._device, self._root, self._kernels = tuple(branches), device, root, kernels
        self._prompts_first = prompts_first
        self.prompt_starts, self.tail_starts = _starts(branches, root, prompts_first)
        """Positions in the stream where each branch's prompt and its first response begin."""
        self._used = root + sum(branch.tokens for branch in branches)
        self._longest = root + max((b.prompt + max(b.responses, default=0) for b in branches), default=0)
        self._gathers: list[_Gather] = []
        self._parts: dict[tuple[int, int | None], tuple[Part, ...]] = {}
        self._in_order: tuple[int, Tiles, Tasks] | None = None

    def attend(self, layer: int, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        if not self._flash_serves(query_HTD, value_KTD, kind):
            return self._dense(query_HTD, key_KTD, value_KTD, kind)
        tokens, window = query_HTD.shape[1], self._window(kind)
        if (tokens, window) not in self._parts:  # the same for every such layer of the stream
            self._parts[tokens, window] = self._plan(tokens - self._used, window)
        query, key, value = (x.transpose(0, 1).contiguous() for x in (query_HTD, key_KTD, value_KTD))
        parts = self._parts[tokens, window]
        ordered = self._ordered(tokens, window, query)
        return flash_attention(query, key, value, parts, kind.scale, self._kernels, ordered, kind.sinks_H)

    def mix(self, layer: int, hidden_TH: Tensor, run: Run) -> Tensor:
        """Run root, prompts and responses apart, each from the state behind what it continues; responses of a prompt together."""
        pieces: dict[int, Tensor] = {}
        root: State | None = None
        if self._root:
            output_1TH, root = run(hidden_TH[None, : self._root], None)
            pieces[0] = output_1TH[0]
        for branch, gather, prompt, tail in zip(
            self._branches, self._gathered(), self.prompt_starts, self.tail_starts, strict=True
        ):
            alone = len(branch.responses) == 1 and tail == prompt + branch.prompt
            end = tail + branch.tail if alone else prompt + branch.prompt
            output_1TH, state = run(hidden_TH[None, prompt:end], root)
            pieces[prompt] = output_1TH[0]
            if not alone and gather.longest:
                rows_GQH = gather.pad(hidden_TH[None, tail : tail + branch.tail])[:, 0]
                output_GQH, _ = run(rows_GQH, rows_of(state, len(branch.responses)))
                pieces[tail] = gather.unpad(output_GQH[:, None])[:, 0]
        padding = hidden_TH.shape[0] - self._used
        return torch.cat(
            [*(pieces[start] for start in sorted(pieces)), hidden_TH.new_zeros(padding, hidden_TH.shape[1])]
        )

    # --- flash ----------------------------------------------------------------------------------------------------
    def _flash_serves(self, query_HTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> bool:
        ordered = self._prompts_first or all(len(branch.responses) <= 1 for branch in self._branches)
        even = query_HTD.shape[-1] == value_KTD.shape[-1]
        return kind.softcap is None and ordered and even and self._kernels.serves(query_HTD)

    def _window(self, kind: AttentionKind) -> int | None:
        """Return the kind's window if some token of the stream does not see all of its sequence."""
        return kind.window if kind.window is not None and kind.window < self._longest else None

    def _plan(self, padding: int, window: int | None = None) -> tuple[Part, ...]:
        """Return the kernel calls. Padding is a segment of its own, so that every row is defined."""
        if window is not None:
            return (Part.windowed(self._pieces(self._used + padding), window, self._device),)
        root, branches = self._root, self._branches
        joined = [branch for branch in branches if branch.tail] if self._prompts_first else []
        if self._prompts_first:
            segments = [*(b.prompt for b in branches), *(length for b in branches for length in b.responses)]
        else:
            segments = [branch.tokens for branch in branches]
        parts = [Part.itself([n for n in (root, *segments, padding) if n], self._device)]
        if joined:
            prompts, tails = [b.prompt for b in joined], [b.tail for b in joined]
            start = self.tail_starts[0]
            responses, keys = slice(start, start + sum(tails)), slice(root, root + sum(prompts))
            parts.append(Part.of(responses, keys, tails, prompts, self._device))
        if root and self._used > root:
            rest = self._used - root
            parts.append(Part.of(slice(root, self._used), slice(0, root), [rest], [root], self._device))
        return tuple(parts)

    def _ordered(self, tokens: int, window: int | None, query_THD: Tensor) -> Ordered | None:
        """Return the work of the passes that are in one order; None if there are none."""
        forward, backward = exact.enabled(), window is None and self._kernels.ordered(query_THD)
        if not forward and not backward:
            return None
        if self._in_order is None or self._in_order[0] != tokens:
            pieces = self._pieces(tokens)
            self._in_order = tokens, tiles_of(pieces, self._device), tasks_of(pieces, self._device)
        _, tiles, tasks = self._in_order
        return Ordered(tiles, tasks if backward else None, forward)

    def _pieces(self, tokens: int) -> list[Piece]:
        """Return root, prompts, responses and padding."""
        root = self._root
        pieces = [Piece(0, root, 0)]
        for branch, prompt, tail in zip(self._branches, self.prompt_starts, self.tail_starts, strict=True):
            pieces.append(Piece(prompt, branch.prompt, root, ((root, 0),)))
            for length in branch.responses:
                seen = ((root, 0), (root + branch.prompt, prompt))
                pieces.append(Piece(tail, length, root + branch.prompt, seen))
                tail += length
        return [*pieces, Piece(self._used, tokens - self._used, 0)]

    # --- dense ----------------------------------------------------------------------------------------------------
    def _dense(self, query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, kind: AttentionKind) -> Tensor:
        """Compute attention branch by branch, for everything that the kernels do not support: CPUs, fp32, caps, values of another
        size than keys, heads of more than 256.
        """
        prompts_THD: list[Tensor] = []
        tails_THD: list[Tensor] = []
        for branch, gather, start, tail in zip(
            self._branches, self._gathered(), self.prompt_starts, self.tail_starts, strict=True
        ):
            rows = slice(start, start + branch.prompt), slice(tail, tail + branch.tail)
            prompt_THD, tail_THD = self._branch(branch, gather, *rows, query_HTD, key_KTD, value_KTD, kind)
            prompts_THD.append(prompt_THD)
            tails_THD.append(tail_THD)
        pieces_THD = [*prompts_THD, *tails_THD]
        if not self._prompts_first:
            pieces_THD = [piece for pair in zip(prompts_THD, tails_THD, strict=True) for piece in pair]
        if self._root:
            query, key, value = (x[None, :, : self._root] for x in (query_HTD, key_KTD, value_KTD))
            pieces_THD.insert(0, causal_attention(query, key, value, kind)[0].transpose(0, 1))
        if self._used < query_HTD.shape[1]:
            heads, tokens = query_HTD.shape[:2]
            pieces_THD.append(query_HTD.new_zeros(tokens - self._used, heads, value_KTD.shape[-1]))
        return torch.cat(pieces_THD)

    def _gathered(self) -> list[_Gather]:
        if not self._gathers:
            self._gathers = [_Gather.of(branch.responses, self._device) for branch in self._branches]
        return self._gathers

    def _branch(
        self,
        branch: Branch,
        gather: _Gather,
        prompt: slice,
        tail: slice,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        kind: AttentionKind,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of a branch's prompt and of its responses, each [·, H, D]."""
        query, key, value = (x[None, :, prompt] for x in (query_HTD, key_KTD, value_KTD))
        if self._root:
            key, value = (torch.cat([x[None, :, : self._root], y], 2) for x, y in ((key_KTD, key), (value_KTD, value)))
        if len(branch.responses) == 1 and tail.start == prompt.stop and not self._root:  # one stretch: causal, no mask
            whole = slice(prompt.start, tail.stop)
            query, key, value = (x[None, :, whole] for x in (query_HTD, key_KTD, value_KTD))
            whole_THD = causal_attention(query, key, value, kind)[0].transpose(0, 1)
            return whole_THD[: branch.prompt], whole_THD[branch.prompt :]
        prompt_THD = causal_attention(query, key, value, kind)[0].transpose(0, 1)
        if not gather.longest:
            return prompt_THD, prompt_THD[:0]
        count = len(branch.responses)
        keys_GKSD = torch.cat([key.expand(count, -1, -1, -1), gather.pad(key_KTD[:, tail])], 2)
        values_GKSD = torch.cat([value.expand(count, -1, -1, -1), gather.pad(value_KTD[:, tail])], 2)
        # All responses at once: their padding is at the end, where causality already hides it.
        output_GHQD = causal_attention(gather.pad(query_HTD[:, tail]), keys_GKSD, values_GKSD, kind)
        return prompt_THD, gather.unpad(output_GHQD)


def _starts(branches: Sequence[Branch], root: int, prompts_first: bool) -> tuple[list[int], list[int]]:
    prompts: list[int] = []
    tails: list[int] = []
    prompt, tail = root, root + sum(branch.prompt for branch in branches)
    for branch in branches:
        prompts.append(prompt)
        tails.append(tail if prompts_first else prompt + branch.prompt)
        prompt += branch.prompt if prompts_first else branch.tokens
        tail += branch.tail
    return prompts, tails


@dataclass(frozen=True, slots=True)
class _Gather:
    """Conversion between responses end to end [X, T, D] and one padded row each [G, X, longest, D]."""

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
