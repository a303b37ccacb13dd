"""Attention of a row in parts that other programs compute: the last of them merges the parts. It needs a GPU."""

from __future__ import annotations

import pytest
import torch

from lockstep.models.attention import AttentionKind
from lockstep.rollout.paged.state import PAGE, PROGRAMS, PageCache, Rows

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu
ROWS, HEADS, KV_HEADS, SIZE, PAGES, TIMES = 256, 12, 2, 128, 12, 300


@pytest.mark.parametrize("sinks", [False, True])
def test_two_parts_are_merged_to_the_same_bits_each_time(sinks: bool) -> None:
    from lockstep.rollout.paged.ops import TritonOps
    from lockstep.rollout.paged.plain import PlainOps

    torch.manual_seed(0)
    device = torch.device("cuda")
    cache = PageCache(1, KV_HEADS, SIZE, torch.bfloat16, device)
    cache.allocate(ROWS * PAGES)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_()
    rows = Rows.empty(ROWS, PAGES, 1, device)
    rows.table_BS[:] = 1 + torch.arange(ROWS * PAGES, device=device).view(ROWS, PAGES).int()
    rows.position_B[:] = torch.randint(PAGES * PAGE, (ROWS,), device=device).int()
    rows.position_B[:4] = torch.tensor([0, 1, PAGE - 1, PAGE])  # some have an empty second part
    heads = tuple(torch.randn(count, ROWS, SIZE, device=device).bfloat16() for count in (HEADS, KV_HEADS, KV_HEADS))
    kind = AttentionKind(SIZE**-0.5, sinks_H=torch.randn(HEADS, device=device) if sinks else None)
    ops = TritonOps()
    whole = ops.attend(heads, rows, cache, 0, kind, 1)
    torch.testing.assert_close(whole, PlainOps().attend(heads, rows, cache, 0, kind, 1), atol=0.02, rtol=0.02)
    first = ops.attend(heads, rows, cache, 0, kind, 2)
    torch.testing.assert_close(first, whole, atol=0.01, rtol=0.01)
    assert ROWS * KV_HEADS <= PROGRAMS == len(cache.arrived)
    for _ in range(TIMES):
        assert torch.equal(ops.attend(heads, rows, cache, 0, kind, 2), first)
    assert not cache.arrived.any()
