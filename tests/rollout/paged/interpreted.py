"""Kernels against their plain torch twins, without a GPU: test_kernels.py runs each check under Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps

import torch

from lockstep.models import exact
from lockstep.models.attention import AttentionKind
from lockstep.rollout.paged.ops import TritonOps
from lockstep.rollout.paged.plain import PlainOps, RowNorm, Turn
from lockstep.rollout.paged.state import PageCache, Rows

CPU = torch.device("cpu")
PLAIN, KERNELS = PlainOps(), TritonOps()
COUNT = 5
SHAPES = ((6, 2, 24), (4, 4, 64), (20, 1, 16))
"""Query heads, key heads, head size: groups, none, more heads than a matrix instruction has rows."""
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2}
"""The interpreter does not compute in bf16."""


def alone(check: Callable[[], None]) -> Callable[[], None]:
    """A check that starts from the same random numbers."""

    @wraps(check)
    def seeded() -> None:
        torch.manual_seed(0)
        check()

    return seeded


def state(kv_heads: int, size: int, dtype: torch.dtype) -> tuple[PageCache, Rows]:
    cache = PageCache(2, kv_heads, size, dtype, CPU)
    cache.allocate(20)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    rows = Rows.empty(8, 4, 40, CPU)
    order = torch.randperm(20) + 1
    for row in range(COUNT):
        rows.table_BS[row] = order[(torch.arange(4) + 3 * row) % 20].int()
    rows.position_B[:COUNT] = torch.tensor([0, 5, 63, 64, 200])
    rows.drawn_B[:COUNT] = torch.tensor([0, 1, 2, 3, 30])
    rows.temperature_B[:COUNT] = torch.tensor([1.0, 0.0, 0.7, 2.0, 1.0])
    rows.budget_B[:] = 31
    rows.ignore_B[3] = 1
    rows.done_B[:COUNT] = 0
    rows.done_B[2] = 1
    return cache, rows


def twins(kv_heads: int, size: int, dtype: torch.dtype) -> tuple[tuple[PageCache, Rows], tuple[PageCache, Rows]]:
    cache, rows = state(kv_heads, size, dtype)
    other, other_rows = copy.deepcopy((cache, rows))
    pairs = [t for pair in zip(other.keys, other.values, strict=True) for t in pair]
    places = [(t.data_ptr() - other.anchor.data_ptr()) // t.element_size() for t in pairs]
    other.offsets.copy_(torch.tensor(places))
    return (cache, rows), (other, other_rows)


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    tolerance = TOLERANCES.get(one.dtype, 0)
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def same_cache(one: PageCache, other: PageCache) -> None:
    for mine, theirs in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        same(mine, theirs)


@alone
def layers() -> None:
    for dtype in TOLERANCES:
        for _ in SHAPES:
            x, residual, weight = (torch.randn(*shape, dtype=dtype) for shape in ((COUNT, 48), (COUNT, 48), (48,)))
            norm, inner = RowNorm(weight, 1e-5), RowNorm(torch.randn(48, dtype=dtype), 1e-5, 1.0, late=True)
            offset = RowNorm(weight, 1e-5, 1.0, late=True)
            for added, one, room, before in (
                (x, norm, 0, None), (None, norm, 0, None), (x, norm, 12, None), (x, offset, 0, inner), (x, offset, 12, None)
            ):  # fmt: skip
                mine, theirs = (ops.add_norm(added, residual, one, room, before) for ops in (PLAIN, KERNELS))
                same(mine[0], theirs[0])
                same(mine[1], theirs[1])
                assert mine[1].stride() == theirs[1].stride() == (48 + room, 1)
            halves = torch.randn(2, COUNT, 48)
            for before in (None, inner):
                whole = PLAIN.add_norm(halves.sum(0).to(dtype), residual, offset, 12, before)
                for one, other in zip(whole, KERNELS.add_norm(halves, residual, offset, 12, before), strict=True):
                    same(one, other)
            for room, gelu in ((0, False), (12, False), (0, True)):
                same(PLAIN.gate(x, room, gelu=gelu), KERNELS.gate(x, room, gelu=gelu))
                assert KERNELS.gate(x, room).stride() == (24 + room, 1)


@alone
def products() -> None:
    """Products of few rows, some with columns behind each row, as an adapter leaves them; two halves are added by the norm."""
    for dtype, tolerance in TOLERANCES.items():
        for inputs, outputs, beside in ((384, 40, 8), (128, 24, 0), (300, 24, 0)):
            x = torch.randn(COUNT, inputs + beside, dtype=dtype)[:, :inputs]
            weight = torch.randn(outputs, inputs + beside, dtype=dtype)[:, :inputs] * inputs**-0.5
            residual, bias = torch.randn(COUNT, outputs, dtype=dtype), torch.randn(outputs, dtype=dtype)
            for given in (bias, None):
                found = KERNELS.product(x, weight, given)
                torch.testing.assert_close(found, PLAIN.product(x, weight, given), atol=tolerance, rtol=tolerance)
            halves = KERNELS.before_norm(x, weight, None)
            assert halves.dim() == (3 if dtype == torch.float16 and inputs == 384 else 2)
            norm = RowNorm(torch.randn(outputs, dtype=dtype), 1e-6)
            whole = PLAIN.add_norm(PLAIN.before_norm(x, weight, None), residual, norm)
            for one, other in zip(KERNELS.add_norm(halves, residual, norm), whole, strict=True):
                torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def new(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a token of each row, from one product as the fused layers have them."""
    qkv = torch.randn(COUNT, (heads + 2 * kv_heads) * size, dtype=dtype)
    return qkv.view(COUNT, -1, size).transpose(0, 1).split([heads, kv_heads, kv_heads])


@alone
def attention() -> None:
    """Every kind of attention with every turn in every shape, in one of the two precisions."""
    for odd, dtype in enumerate(TOLERANCES):
        for heads, kv_heads, size in SHAPES:
            sinks, angle = torch.randn(heads), torch.rand(300, size // 2)
            early, late = (
                (
                    RowNorm(torch.randn(size, dtype=dtype), 1e-6, *kind),
                    RowNorm(torch.randn(size, dtype=dtype), 1e-6, *kind),
                )
                for kind in ((0.0, False), (1.0, True))
            )
            part = angle[:, : size // 4].contiguous()
            turns = (
                None, Turn(angle.cos(), angle.sin()), Turn(angle.cos(), angle.sin(), early),
                Turn(part.cos(), part.sin(), late, interleaved=True), Turn(part.cos(), part.sin()),
            )  # fmt: skip
            kinds = (
                AttentionKind(0.3),
                AttentionKind(0.3, window=70),
                AttentionKind(0.3, softcap=2.0),
                AttentionKind(0.3, window=7, sinks_H=sinks),
            )
            for number, kind in enumerate(kinds):
                for splits, turn in list(zip((1, 2, 8, 1, 2), turns, strict=True))[(odd + number) % 2 :: 2]:
                    given = new(heads, kv_heads, size, dtype)
                    (cache, rows), (other, other_rows) = twins(kv_heads, size, dtype)
                    other.keys[0][other_rows.table_BS[1, 0], :, 6:] = torch.nan  # where nothing was written yet
                    expected = PLAIN.attend(given, rows, cache, 0, kind, 1, turn=turn)
                    found = KERNELS.attend(given, other_rows, other, 0, kind, splits, turn=turn)
                    same(expected, found)
                    if size != 24 and kind.softcap is None and (turn is None or turn.norms is not late):
                        with exact.on_trial():
                            copied = torch.cat(given).transpose(0, 1).contiguous().transpose(0, 1)  # it norms in place
                            parts = copied.split([heads, kv_heads, kv_heads])
                            same(expected, KERNELS.attend(parts, other_rows, other, 0, kind, splits, turn=turn))
                    other.keys[0][other_rows.table_BS[1, 0], :, 6:] = cache.keys[0][rows.table_BS[1, 0], :, 6:]
                    same_cache(cache, other)
        for splits in (1, 2):  # of the last shape and kind
            (cache, rows), (other, other_rows) = twins(kv_heads, size, dtype)
            expected = PLAIN.attend(given, rows, cache, 0, kind, 1)
            roomy = KERNELS.attend(given, other_rows, other, 0, kind, splits, 12)
            same(expected, roomy)
            assert roomy.stride() == (heads * size + 12, 1)


@alone
def sampling() -> None:
    differing = 0
    for vocabulary in (9000, 4096, 700):
        (_, rows), (_, other) = twins(2, 16, torch.float32)
        for _ in range(20):
            logits = torch.randn(COUNT, vocabulary) * 4
            rows.seed_B[:COUNT] = torch.randint(-(2**62), 2**62, (COUNT,))
            other.seed_B.copy_(rows.seed_B)
            PLAIN.draw(logits.clone(), rows)
            KERNELS.draw(logits, other)
            equal = rows.token_B == other.token_B
            differing += int((~equal).sum())
            torch.testing.assert_close(rows.logprob_B[equal], other.logprob_B[equal], atol=1e-4, rtol=1e-4)
            stops = torch.tensor([int(rows.token_B[0]), int(rows.token_B[3]), -1])
            other.token_B.copy_(rows.token_B)
            other.logprob_B.copy_(rows.logprob_B)
            PLAIN.advance(rows, COUNT, stops)
            KERNELS.advance(other, COUNT, stops)
            for name in ("next_B", "position_B", "drawn_B", "done_B", "ids_BN", "logprobs_BN"):
                torch.testing.assert_close(getattr(rows, name), getattr(other, name))
            assert rows.done_B[:COUNT].tolist()[:1] == [1]
            assert rows.done_B[3] == (rows.drawn_B[3] >= rows.budget_B[3])
            for each in (rows, other):
                each.done_B[[0, 1, 3, 4]] = 0
                each.drawn_B[:COUNT].clamp_(max=30)
    # Sums of a row in another order may move a bound past a random number: a matter of one draw in hundreds.
    assert differing <= 2, differing
