"""The Triton kernel against the sum as torch computes it. Triton's interpreter runs it here; on a GPU it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lockstep.sync.fingerprint import BLOCK, KEY_A, KEY_B, MASK, _bits, _table, _torch_sum, fingerprint
from lockstep.types import WeightStream
from tests.interpreter import interpreted

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64)
COUNTS = (1, 2, 255, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17)


def compare(device: str) -> int:
    """Every dtype and size, random bits, one launch for dense tensors and one for all kinds: how many sums were compared."""
    from lockstep.sync import kernels

    with patch.object(kernels, "PROGRAMS", 2):  # the longest has more blocks than programs
        return compared_by(kernels.tensor_sums, device)


def compared_by(tensor_sums: Callable[..., Tensor], device: str) -> int:
    """Tensors of one row that stands for all rows, and some that begin at odd addresses, in launches of their own, too."""
    generator = torch.Generator().manual_seed(0)
    compared = 0
    for dtype in DTYPES:
        raws = [torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator) for n in COUNTS]
        flat = [raw.view(dtype) for raw in raws]
        matrix = flat[-1][: 3 * BLOCK].view(96, 128)
        given = [*flat, matrix, matrix[:, :77], matrix[1::2, 3:9], matrix[:, 5:6], matrix[:1].expand(96, 128)]
        tables = [_table(key, count, torch.device(device)) for key, count in ((KEY_A, BLOCK), (KEY_B, 4))]
        for tensors in (flat, given, given[-1:], [tensor[1:] for tensor in flat[1:]]):
            moved = [at_same_places(_bits(tensor), device) for tensor in tensors]
            sums = [total & MASK for total in tensor_sums(moved, *tables).tolist()]
            assert sums == [int(_torch_sum(_bits(tensor).reshape(-1))) & MASK for tensor in tensors], dtype
            compared += len(sums)
    return compared


def at_same_places(tensor: Tensor, device: str) -> Tensor:
    """On the device, with the strides that it has here."""
    if tensor.is_contiguous():
        whole = torch.empty(tensor.storage_offset() + tensor.numel(), dtype=tensor.dtype, device=device)
        return whole[tensor.storage_offset() :].view(tensor.shape).copy_(tensor)
    if tensor.stride(0) == 0:
        return tensor[:1].to(device).expand(tensor.shape)
    whole = torch.zeros(tensor.shape[0], tensor.stride(0), dtype=tensor.dtype, device=device)
    whole[:, : tensor.shape[1]] = tensor.to(device)
    return whole[:, : tensor.shape[1]]


def compare_all(device: str) -> None:
    assert compare(device) == len(DTYPES) * (3 * len(COUNTS) + 5)


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
        for part in (tensor, tensor[1:]):
            assert fingerprint(iter([("w", part.cuda())])) == fingerprint(iter([("w", part)]))


@pytest.mark.gpu
def test_a_stream_on_a_gpu_has_the_fingerprints_that_it_has_on_a_cpu():
    """Several sizes of elements, strided and empty tensors, one on the CPU beside the others, and more than a launch holds."""
    generator = torch.Generator().manual_seed(2)
    stream = [(f"{i}", torch.randn(3 + i, 70 * i, generator=generator).to(DTYPES[i % 3])) for i in range(40)]
    stream.append(("large", torch.randn(300, 1 << 19, generator=generator).bfloat16()))
    expected = fingerprint(iter(stream))

    def moved() -> WeightStream:
        for place, (name, tensor) in enumerate(stream):
            yield name, tensor if place == 5 else torch.cat([tensor, tensor], -1).cuda()[..., : tensor.shape[-1]]

    assert fingerprint(moved()) == expected
