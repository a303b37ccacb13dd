"""The operations of a decode step by Triton kernels on a GPU. `plain.py` computes the same with the same shapes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.models import exact
from lockstep.models.attention import AttentionKind
from lockstep.rollout.paged.plain import PlainOps, RowNorm, Turn, Unsummed, of_module
from lockstep.rollout.paged.state import PAGE, PageCache, Rows

MATRIX_ROWS, MATRIX_COLUMNS = 16, 8
"""Least rows and columns of a matrix instruction: the query heads of one key head are padded to either, rows if exact."""

HALVED, DEEP, LARGE = (96, 512), 2.5, 1_400_000
"""Rows, features by outputs, and most numbers of a result, for which the halves of a product, side by side, take less time than
the whole.
"""
OURS, BLOCK = 8192, 128
"""Most outputs of a product that our kernel computes for few rows, and what its inputs must be a multiple of: else cuBLAS is as
fast.
"""

KEYS = 32
"""Keys per iteration of the attention kernel. Small programs of one warp, many to a multiprocessor, hide memory latency best."""


class Ops(Protocol):
    """The operations of a decode step, besides matrix products. Rows are the first ones of `rows`, as many as the input has.

    `room` is the number of free columns in memory after each row of a result: an adapter's product is written there.
    """

    def add_norm(
        self,
        x_BX: Tensor | Unsummed | None,
        residual_BX: Tensor,
        norm: RowNorm,
        room: int = 0,
        inner: RowNorm | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (residual + x, its norm). With `inner`, x is normed before it is added; the two norms differ by their weight."""

    def mixture(self, module: nn.Module, x_BX: Tensor) -> Tensor | Unsummed:
        """Compute a mixture of experts; the sum over a row's experts may be left to `add_norm`."""

    def gate(self, x_BX: Tensor, room: int = 0, *, gelu: bool = False) -> Tensor:
        """Return silu(first half) × second half, or with gelu in its approximation by tanh."""

    def product(self, x_BX: Tensor, weight_OX: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x Wᵀ + bias, [B, O]."""

    def before_norm(self, x_BX: Tensor, weight_OX: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x Wᵀ + bias for `add_norm`, [B, O]; or its halves over the features in fp32, [2, B, O], where that is faster."""

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
        """Compute attention of each row's new token over its pages and itself, [B, H·D]; in `splits` parallel parts.

        `heads` are the token's queries [H, B, D], keys and values [K, B, D]; `turn` says what is done to them first. Keys and
        values are written to the pages.
        """

    def draw(self, logits_BV: Tensor, rows: Rows) -> None:
        """Draw a token for each row from softmax(logits / temperature) into rows.token_B and rows.logprob_B."""

    def advance(self, rows: Rows, count: int, stops_X: Tensor) -> None:
        """Store the drawn token of rows that still run, and mark those that end with it."""


class TritonOps:
    """Implements Ops on a GPU."""

    def __init__(self) -> None:
        from lockstep.models import experts, head_kernels, norm_kernels, ordered_attention, ordered_product_kernel
        from lockstep.models.overlap import overlap
        from lockstep.rollout.paged import attention_kernels, kernels, ordered_kernels

        self._kernels: Any = kernels
        self._experts: Any = experts
        self._norms: Any = norm_kernels
        self._heads: Any = head_kernels
        self._ordered: Any = ordered_attention
        self._products: Any = ordered_product_kernel
        self._attention: Any = attention_kernels
        self._attention_in_order: Any = ordered_kernels
        self._overlap = overlap

    def add_norm(
        self,
        x_BX: Tensor | Unsummed | None,
        residual_BX: Tensor,
        norm: RowNorm,
        room: int = 0,
        inner: RowNorm | None = None,
    ) -> tuple[Tensor, Tensor]:
        out_BX = with_room(residual_BX, residual_BX.shape[1], room)
        total_BX = residual_BX if x_BX is None else torch.empty_like(residual_BX)
        if not isinstance(x_BX, Tensor | None):
            if inner is None and not norm.offset:
                x_BX.add_norm(residual_BX, norm.weight_X, norm.eps, total_BX, out_BX, late=norm.late)
                return total_BX, out_BX
            x_BX = x_BX.summed()
        self._norms.row_norm(
            x_BX, residual_BX, norm.weight_X, norm.eps, total_BX, out_BX, late=norm.late, offset=norm.offset,
            inner_H=None if inner is None else inner.weight_X,
        )  # fmt: skip
        return total_BX, out_BX

    def mixture(self, module: nn.Module, x_BX: Tensor) -> Tensor | Unsummed:
        unsummed = None if exact.enabled() else self._experts.before_the_sum(module, x_BX)
        return of_module(module, x_BX) if unsummed is None else unsummed

    def gate(self, x_BX: Tensor, room: int = 0, *, gelu: bool = False) -> Tensor:
        count, size = x_BX.shape[0], x_BX.shape[1] // 2
        out_BX = with_room(x_BX, size, room)
        block = min(2048, _power(size))
        self._kernels.gate_kernel[(count, -(-size // block))](
            x_BX, out_BX, out_BX.stride(0), size, block, gelu, **self._overlap()
        )
        return out_BX

    def product(self, x_BX: Tensor, weight_OX: Tensor, bias_O: Tensor | None) -> Tensor:
        rows, outputs = len(x_BX), len(weight_OX)
        if not self._ours(x_BX, outputs):
            return nn.functional.linear(x_BX, weight_OX, bias_O)
        out_BO, tile = x_BX.new_empty(rows, outputs), self._products.tile_of(rows, outputs)
        self._products.product(x_BX, weight_OX, bias_O, 1.0, out_BO, tile)
        return out_BO

    def before_norm(self, x_BX: Tensor, weight_OX: Tensor, bias_O: Tensor | None) -> Tensor:
        (rows, inputs), outputs, products = x_BX.shape, len(weight_OX), self._products
        deep, halves = inputs >= DEEP * outputs, bias_O is None and x_BX.dtype.itemsize == 2
        tile = products.tile_of(rows, outputs)
        narrow = outputs < products.MANY and tile.depth < inputs
        if halves and narrow and rows <= products.FEW // 2 and self._ours(x_BX, outputs):
            half = -(-inputs // 2 // tile.depth) * tile.depth
            sums_2BO: Tensor = products.side_sums(x_BX, weight_OX, half, tile)
            return sums_2BO
        if halves and deep and inputs % 16 == 0 and HALVED[0] <= rows <= HALVED[1] and rows * outputs <= LARGE:
            x_2BY = x_BX.view(rows, 2, inputs // 2).transpose(0, 1)
            return torch.bmm(x_2BY, weight_OX.view(outputs, 2, inputs // 2).permute(1, 2, 0), out_dtype=torch.float32)
        if deep and narrow:  # cuBLAS splits the inputs, too
            return nn.functional.linear(x_BX, weight_OX, bias_O)
        return self.product(x_BX, weight_OX, bias_O)

    def _ours(self, x_BX: Tensor, outputs: int) -> bool:
        """Return whether our kernel is faster than cuBLAS."""
        rows, inputs = x_BX.shape
        return rows <= self._products.FEW and outputs <= OURS and inputs % BLOCK == 0 and x_BX.dtype.itemsize == 2

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
        query_HBD, key_KBD, value_KBD = (one if one.stride(-1) == 1 else one.contiguous() for one in heads)
        out_BX = with_room(query_HBD[0], query_HBD.shape[0] * cache.size, room)
        if exact.enabled():
            self._in_order(query_HBD, key_KBD, value_KBD, rows, cache, layer, kind, splits, turn, out_BX)
        else:
            self._at_once(query_HBD, key_KBD, value_KBD, rows, cache, layer, kind, splits, turn, out_BX)
        return out_BX

    def _at_once(
        self, query_HBD: Tensor, key_KBD: Tensor, value_KBD: Tensor, rows: Rows, cache: PageCache, layer: int,
        kind: AttentionKind, splits: int, turn: Turn | None, out_BX: Tensor,
    ) -> None:  # fmt: skip
        heads, count, size = query_HBD.shape
        assert splits != 2 or count * cache.heads <= len(cache.arrived), "more programs than the cache counts parts of"
        parts = (count, heads, splits)
        wide = {"dtype": torch.float32, "device": query_HBD.device}
        part = torch.empty((*parts, size) if splits > 1 else 1, **wide)  # type: ignore[call-overload]
        peak, mass = (torch.empty(parts if splits > 1 else 1, **wide) for _ in range(2))  # type: ignore[call-overload]
        unused = RowNorm(query_HBD, 0.0)
        norms = None if turn is None else turn.norms
        norm, key_norm = norms or (unused, unused)
        cos, sin, half, interleaved = _tables(turn, query_HBD)
        sinks = query_HBD if kind.sinks_H is None else kind.sinks_H
        block, group = _power(size), max(MATRIX_COLUMNS, _power(heads // cache.heads))
        self._attention.attend_kernel[(count, cache.heads, splits)](
            query_HBD, key_KBD, value_KBD, norm.weight_X, key_norm.weight_X, cos, sin, rows.table_BS, rows.position_B,
            cache.anchor, cache.offsets, sinks, out_BX, part, peak, mass, cache.arrived, layer, rows.table_BS.stride(0),
            *query_HBD.stride()[:2], *key_KBD.stride()[:2], *value_KBD.stride()[:2], out_BX.stride(0), norm.eps, norm.offset,
            kind.scale, kind.softcap or 1.0, kind.window or 0, heads, cache.heads, size, block, group, PAGE, KEYS, splits,
            kind.window is not None, kind.softcap is not None, kind.sinks_H is not None, norms is not None, norm.late, half,
            interleaved,
            "ieee" if query_HBD.dtype == torch.float32 else "tf32",
            num_warps=1 if block <= 128 and block * group <= 2048 else 4,
            num_stages=3,  # the number of the next page is read ahead
            **self._overlap(),
        )  # fmt: skip
        if splits > 2:
            self._attention.combine_kernel[(count, heads)](
                part, peak, mass, sinks, out_BX, out_BX.stride(0), heads, size, block, splits, kind.sinks_H is not None,
                num_warps=1, **self._overlap(),
            )  # fmt: skip

    def _in_order(
        self, query_HBD: Tensor, key_KBD: Tensor, value_KBD: Tensor, rows: Rows, cache: PageCache, layer: int,
        kind: AttentionKind, splits: int, turn: Turn | None, out_BX: Tensor,
    ) -> None:  # fmt: skip
        """Compute it with the bits of models.ordered_attention."""
        heads, count, size = query_HBD.shape
        most = -(-rows.table_BS.shape[1] * PAGE // self._ordered.PART)
        assert splits == 1 or count * cache.heads <= len(cache.arrived), "more programs than the cache counts parts of"
        splits = min(splits, most)
        parts = count * heads * most if splits > 1 else 0
        new = {"dtype": torch.float32, "device": query_HBD.device}
        total, peak, mass = (torch.empty(parts * numbers, **new) for numbers in (size, 1, 1))  # type: ignore[call-overload]
        if turn is not None and turn.norms is not None:
            # Their sums have training's order only in a kernel like training's. A row's keys stand behind its queries.
            both_BX = query_HBD.as_strided((count, (heads + cache.heads) * size), (query_HBD.stride(1), 1))
            query_norm, key_norm = turn.norms
            given = query_norm.weight_X, key_norm.weight_X, query_norm.eps
            self._norms.norm_heads(both_BX, *given, heads, cache.heads)
        cos, sin, half, interleaved = _tables(turn, query_HBD)
        wide = count * cache.heads < 512
        registers = 128 if wide else 200 if most > 1 else None  # four or five programs fit a multiprocessor
        self._attention_in_order.ordered_attend_kernel[(count, cache.heads, splits)](
            query_HBD, key_KBD, value_KBD, cos, sin, rows.table_BS, rows.position_B, cache.anchor, cache.offsets,
            out_BX if kind.sinks_H is None else kind.sinks_H, out_BX, total, peak, mass, cache.arrived, most, layer,
            rows.table_BS.stride(0),
            *query_HBD.stride()[:2], *key_KBD.stride()[:2], *value_KBD.stride()[:2], out_BX.stride(0),
            kind.scale * self._ordered.LOG2_E, kind.window or 0, heads, cache.heads, size,
            max(MATRIX_ROWS, _power(heads // cache.heads)), PAGE, self._ordered.ONES, self._ordered.PART // PAGE, most > 1,
            splits > 1, kind.window is not None, kind.sinks_H is not None, half, interleaved,
            num_warps=4 if wide else 2, num_stages=2, enable_fp_fusion=False, maxnreg=registers if size <= 128 else None,
            **self._overlap(),
        )  # fmt: skip

    def draw(self, logits_BV: Tensor, rows: Rows) -> None:
        count, vocabulary = logits_BV.shape
        peak_BC, mass_BC, best_BC = self._heads.summaries(logits_BV, rows.temperature_B)
        chunks = peak_BC.shape[1]
        self._kernels.draw_kernel[(count,)](
            logits_BV,
            rows.temperature_B,
            rows.seed_B,
            rows.drawn_B,
            peak_BC,
            mass_BC,
            best_BC,
            rows.token_B,
            rows.logprob_B,
            vocabulary,
            chunks,
            self._heads.CHUNK,
            max(16, _power(chunks)),
            num_warps=8,
            **self._overlap(),
        )
        if exact.enabled():
            given = rows.token_B, rows.temperature_B, peak_BC, mass_BC, rows.logprob_B
            self._heads.pick_logprobs(logits_BV, *given)

    def advance(self, rows: Rows, count: int, stops_X: Tensor) -> None:
        self._kernels.advance_kernel[(count,)](
            rows.token_B,
            rows.logprob_B,
            rows.next_B,
            rows.position_B,
            rows.drawn_B,
            rows.budget_B,
            rows.ignore_B,
            rows.done_B,
            rows.ids_BN,
            rows.logprobs_BN,
            stops_X,
            stops_X.numel(),
            rows.ids_BN.stride(0),
            _power(max(2, stops_X.numel())),
            num_warps=1,
            **self._overlap(),
        )


def ops_for(device: torch.device) -> Ops:
    """Return the kernels on a GPU, plain torch elsewhere."""
    return TritonOps() if device.type == "cuda" else PlainOps()


def with_room(like_BX: Tensor, size: int, room: int) -> Tensor:
    """Return uninitialised rows of `size`, as many as `like_BX` has, with `room` free columns after each."""
    return like_BX.new_empty(like_BX.shape[0], size + room)[:, :size]


def _tables(turn: Turn | None, unused: Tensor) -> tuple[Tensor, Tensor, int, bool]:
    """Return cos and sin, the number of pairs of a head that are rotated, and whether these are neighbours."""
    return (unused, unused, 0, False) if turn is None else (turn.cos, turn.sin, turn.cos.shape[1], turn.interleaved)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
