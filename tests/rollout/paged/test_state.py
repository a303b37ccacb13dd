"""What a cache of pages does with the memory of a GPU."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.paged.state import GROWN, HANDED_BACK, PageCache


@pytest.mark.gpu
def test_the_first_large_caches_are_handed_back_to_the_gpu():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    cache = PageCache(2, 2, 64, torch.bfloat16, device)
    pages = 2 * GROWN // cache.bytes_per_page
    before = torch.cuda.memory_reserved()
    for _ in range(HANDED_BACK):
        cache.allocate(pages)
        assert torch.cuda.memory_reserved() > before + GROWN
        cache.release()
        assert torch.cuda.memory_reserved() < before + GROWN
    cache.allocate(pages)
    cache.release()
    assert torch.cuda.memory_reserved() > before + GROWN
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_memory_that_torch_keeps_serves_a_cache_and_stays():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    kept = torch.empty(5 * GROWN // 2, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_reserved()
    del kept
    cache = PageCache(2, 2, 64, torch.bfloat16, device)
    cache.allocate(2 * GROWN // cache.bytes_per_page)
    cache.release()
    assert torch.cuda.memory_reserved() < before + GROWN // 64  # the anchor's
    torch.cuda.empty_cache()
