"""The operations of a decode step in plain torch: they define the kernels' results, and are used where Triton is missing.

Legend: B rows, H query heads, K key/value heads, D head size, S keys, V vocabulary, X features, P tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.attention import AttentionKind
from lockstep.rollout.paged.state import PAGE, PageCache, Rows
from lockstep.rollout.sampler import sample_rows


class Unsummed(Protocol):
    """The results of a mixture's experts whose sum is left to the next norm."""

    def summed(self) -> Tensor:
        """Return the sums, [B, X]."""

    def add_norm(
        self, residual_TO: Tensor, weight_O: Tensor, epsilon: float, sum_TO: Tensor, out_TO: Tensor, *, late: bool
    ) -> None:
        """Write residual + sum to `sum_TO`, and its norm to `out_TO`."""


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMS norm: x / rms(x) · (offset + weight)."""

    weight_X: Tensor
    eps: float
    offset: float = 0.0
    late: bool = False
    """It rounds once, after the weight; else before it, too."""

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.late:
            return (normed * (self.offset + self.weight_X.float())).to(x.dtype)
        return normed.to(x.dtype) * self.weight_X


@dataclass(frozen=True, slots=True)
class Turn:
    """Norms and rotary embedding of query and key heads before attention."""

    cos: Tensor
    """fp32 of every position, [positions, half of the entries that are rotated]; the rest of a head is left as it is."""
    sin: Tensor
    norms: tuple[RowNorm, RowNorm] | None = None
    """Those of queries and keys, if they have any."""
    interleaved: bool = False
    """Neighbours are rotated together; else an entry of the first half with one of the second."""

    def applied(self, query_HBD: Tensor, key_KBD: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the heads of each row's new token as they enter attention."""
        position_B = rows.position_B[: query_HBD.shape[1]].long()
        cos, sin = self.cos[position_B], self.sin[position_B]
        if self.norms is not None:
            query_HBD, key_KBD = (norm(x) for x, norm in zip((query_HBD, key_KBD), self.norms, strict=True))
        return self._turned(query_HBD, cos, sin), self._turned(key_KBD, cos, sin)

    def _turned(self, x_HBD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rounded(wide: Tensor) -> Tensor:
            return wide.to(x_HBD.dtype).float()  # where the model rounds

        size = 2 * cos.shape[-1]
        part, rest = x_HBD[..., :size].float(), x_HBD[..., size:]
        low, high = (part[..., ::2], part[..., 1::2]) if self.interleaved else part.chunk(2, -1)
        turned = rounded(low * cos) - rounded(high * sin), rounded(high * cos) + rounded(low * sin)
        whole = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat([whole.to(x_HBD.dtype), rest], -1)


class PlainOps:
    """Implements ops.Ops on any device."""

    def mixture(self, module: nn.Module, x_BX: Tensor) -> Tensor:
        return of_module(module, x_BX)

    def add_norm(
        self,
        x_BX: Tensor | Unsummed | None,
        residual_BX: Tensor,
        norm: RowNorm,
        room: int = 0,
        inner: RowNorm | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(x_BX, Tensor | None):
            x_BX = x_BX.summed()
        if x_BX is not None:
            residual_BX = residual_BX + (x_BX if inner is None else inner(x_BX))
        return residual_BX, _with_room(norm(residual_BX), room)

    def gate(self, x_BX: Tensor, room: int = 0, *, gelu: bool = False) -> Tensor:
        gate_BX, up_BX = x_BX.chunk(2, -1)
        activated_BX = F.gelu(gate_BX, approximate="tanh") if gelu else F.silu(gate_BX)
        return _with_room(activated_BX * up_BX, room)

    def product(self, x_BX: Tensor, weight_OX: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_BX, weight_OX, bias_O)

    before_norm = product

    def append(self, key_KBD: Tensor, value_KBD: Tensor, rows: Rows, cache: PageCache, layer: int) -> None:
        """Write one key and value for each row at its position."""
        count = key_KBD.shape[1]
        position_B = rows.position_B[:count].long()
        page_B = rows.table_BS[:count].gather(1, (position_B // PAGE)[:, None])[:, 0].long()
        cache.keys[layer][page_B, :, position_B % PAGE] = key_KBD.transpose(0, 1)
        cache.values[layer][page_B, :, position_B % PAGE] = value_KBD.transpose(0, 1)

    def attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        rows: Rows,
        cache: PageCache,
        layer: int,
        kind: AttentionKind,
        splits: int,
        room: int = 0,
        turn: Turn | None = None,
    ) -> Tensor:
        query_HBD, key_KBD, value_KBD = heads
        if turn is not None:
            query_HBD, key_KBD = turn.applied(query_HBD, key_KBD, rows)
        self.append(key_KBD, value_KBD, rows, cache, layer)
        return self._over_pages(query_HBD, rows, cache, layer, kind, room)

    def _over_pages(
        self, query_HBD: Tensor, rows: Rows, cache: PageCache, layer: int, kind: AttentionKind, room: int
    ) -> Tensor:
        heads, count, size = query_HBD.shape
        table_BS = rows.table_BS[:count].long()
        key, value = (
            t[layer][table_BS].transpose(2, 3).flatten(1, 2).repeat_interleave(heads // cache.heads, 2)
            for t in (cache.keys, cache.values)
        )
        position_B1 = rows.position_B[:count, None].long()
        index_S = torch.arange(key.shape[1], device=key.device)
        seen_BS = index_S <= position_B1
        if kind.window is not None:
            seen_BS &= index_S > position_B1 - kind.window
        scores_BHS = torch.einsum("hbd,bshd->bhs", query_HBD.float(), key.float()) * kind.scale
        if kind.softcap is not None:
            scores_BHS = kind.softcap * torch.tanh(scores_BHS / kind.softcap)
        scores_BHS = scores_BHS.masked_fill(~seen_BS[:, None], -torch.inf)
        if kind.sinks_H is not None:
            sinks = kind.sinks_H.float()[None, :, None].expand(count, -1, 1)
            probs_BHS = torch.cat([scores_BHS, sinks], -1).softmax(-1)[..., :-1]
        else:
            probs_BHS = scores_BHS.softmax(-1)
        value = value.float().masked_fill(~seen_BS[:, :, None, None], 0)  # unwritten parts of a page may hold anything
        out_BHD = torch.einsum("bhs,bshd->bhd", probs_BHS, value).to(query_HBD.dtype)
        return _with_room(out_BHD.view(count, heads * size), room)

    def draw(self, logits_BV: Tensor, rows: Rows) -> None:
        count = logits_BV.shape[0]
        token_B, logprob_B = sample_rows(
            logits_BV.float(), rows.temperature_B[:count], rows.seed_B[:count], rows.drawn_B[:count]
        )
        rows.token_B[:count] = token_B
        rows.logprob_B[:count] = logprob_B

    def advance(self, rows: Rows, count: int, stops_X: Tensor) -> None:
        live_B = rows.done_B[:count] == 0
        token_B, drawn_B = rows.token_B[:count], rows.drawn_B[:count]
        at_B = drawn_B.long().clamp(max=rows.ids_BN.shape[1] - 1)[:, None]
        for kept_BN, new_B in ((rows.ids_BN, token_B), (rows.logprobs_BN, rows.logprob_B[:count])):
            now_B1 = kept_BN[:count].gather(1, at_B)
            kept_BN[:count].scatter_(1, at_B, torch.where(live_B[:, None], new_B[:, None].to(kept_BN.dtype), now_B1))
        rows.next_B[:count] = torch.where(live_B, token_B, rows.next_B[:count])
        rows.position_B[:count] += live_B
        rows.drawn_B[:count] += live_B
        stopped_B = torch.isin(token_B, stops_X) & (rows.ignore_B[:count] == 0)
        spent_B = rows.drawn_B[:count] >= rows.budget_B[:count]
        rows.done_B[:count] = (~live_B | stopped_B | spent_B).to(torch.int8)


def of_module(mixture: nn.Module, x_BX: Tensor) -> Tensor:
    """Compute a mixture of experts by its module."""
    out = mixture(x_BX[None])
    mixed_BX: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return mixed_BX


def _with_room(x_BX: Tensor, room: int) -> Tensor:
    """Return the same with `room` free columns in memory after each row, uninitialised until they are written."""
    return F.pad(x_BX, (0, room), value=torch.nan)[..., : x_BX.shape[-1]] if room else x_BX
