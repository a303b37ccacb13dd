"""The Triton kernel against the sum as torch computes it. Triton's interpreter runs it here; on a GPU it is compiled."""

from __future__ import annotations

import pytest
import torch

from lockstep.sync.fingerprint import BLOCK, KEY_A, MASK, _rows, _table, shard_sum
from tests.interpreter import interpreted

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64)
COUNTS = (1, 2, 255, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17)


def compare(device: str) -> int:
    """Every dtype and size, random bits: how many sums were compared."""
    from lockstep.sync.kernels import add_sum

    generator = torch.Generator().manual_seed(0)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    compared = 0
    for dtype in DTYPES:
        for count in COUNTS:
            raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            bits = raw.view(integers[dtype.itemsize]).to(device)
            total = torch.zeros((), dtype=torch.int64, device=device)
            blocks = -(-count // BLOCK)
            add_sum(total, bits, _table(KEY_A, BLOCK, bits.device), _rows(0, blocks, bits.device))
            assert int(total.item()) & MASK == shard_sum(raw.view(dtype)), (dtype, count)
            compared += 1
    return compared


def compare_all(device: str) -> None:
    assert compare(device) == len(DTYPES) * len(COUNTS)


def test_the_kernel_is_the_sum():
    pytest.importorskip("triton")
    interpreted(compare_all, "cpu")


@pytest.mark.gpu
def test_the_kernel_is_the_sum_on_a_gpu():
    compare_all("cuda")


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_has_the_fingerprint_that_it_has_on_a_cpu():
    generator = torch.Generator().manual_seed(1)
    for shape in ((5,), (64, 64), (100, 999), (3, 4096)):
        tensor = torch.randn(shape, generator=generator).bfloat16()
        assert shard_sum(tensor.cuda()) == shard_sum(tensor)
        assert shard_sum(tensor.cuda()[1:]) == shard_sum(tensor[1:])
