"""Sends weights from the trainer that owns them to all samplers, in buckets, by its own process group beside that of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 2**27
"""Bytes of a message: one tensor more than fits below this."""
WAIT = timedelta(minutes=10)
"""Longest wait for the others of a channel; the driver's deadlines come first, and a lost peer is known at once on a CPU."""
MEET = timedelta(minutes=1)
"""The same on a CPU, where peers wait for each other to connect: less than the driver's shortest deadline."""


class Channel:
    """A group of processes of which the first sends. It is no part of training's group: a sampler that dies takes no trainer
    with it, and a new channel does without it.
    """

    def __init__(self, meet: str, rank: int, size: int, device: torch.device) -> None:
        """Meet the others through a file that is new for each channel."""
        self._rank = rank
        c10d: Any = dist  # its stubs lack some names
        group = c10d.ProcessGroupNCCL if device.type == "cuda" else c10d.ProcessGroupGloo
        self._group = group(c10d.FileStore(meet, size), rank, size, WAIT if device.type == "cuda" else MEET)

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first process's tensors into those of the others; all give tensors of the same shapes.

        While a bucket travels, the next is put together, and the one before it is copied to its place.
        """
        under_way: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
        for bucket in _buckets(tensors):
            if self._rank:
                flat = bucket[0].new_empty(sum(tensor.numel() for tensor in bucket))
            else:
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            under_way.append((self._group.broadcast(flat, 0), flat, bucket))
            if len(under_way) > 1:
                self._take(*under_way.popleft())
        for sent in under_way:
            self._take(*sent)

    def _take(self, broadcast: Any, flat: Tensor, bucket: list[Tensor]) -> None:
        """Wait for a bucket, and copy it to its place if this process receives."""
        broadcast.wait()
        if self._rank:
            pieces = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [p.view(t.shape) for p, t in zip(pieces, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype in groups, in an order that depends on their shapes and dtypes alone."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype == dtype:
                bucket.append(tensor)
                if sum(one.nbytes for one in bucket) >= BUCKET_BYTES:
                    yield bucket
                    bucket = []
        if bucket:
            yield bucket
