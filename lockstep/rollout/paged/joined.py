"""Joins several parameters into one tensor, of which they become views: decoding then needs one matrix multiplication.

Legend: X inputs, O outputs, R ranks of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lockstep.models.one_input import adjacent

ALIGNED = 64
"""A row of weights with adapters beside it is padded to a multiple of this many numbers: 128 bytes in bf16."""


def side_by_side(
    weights: Sequence[nn.Parameter], ups: Sequence[nn.Parameter], names: dict[int, str], fused: dict[str, Tensor]
) -> Tensor:
    """Return one tensor with the weights [O, X] one below the other, and to the right of each its up matrix [O, R] in its own
    columns; elsewhere it is 0. The parameters become parts of it, unless they are already.
    """
    size = weights[0].shape[1]
    outputs, ranks = slices([w.shape[0] for w in weights]), slices([up.shape[1] for up in ups])
    columns = size + ranks[-1].stop
    first = weights[0].data
    stride = -(-columns // ALIGNED) * ALIGNED
    shape = (outputs[-1].stop, columns)
    room = first.storage_offset() + shape[0] * stride <= first.untyped_storage().nbytes() // first.element_size()
    kept = first.as_strided(shape, (stride, 1)) if first.stride() == (stride, 1) and room else None

    def places(wide_OY: Tensor) -> list[Tensor]:
        below = [wide_OY[rows, :size] for rows in outputs]
        return below + [wide_OY[rows, size + r.start : size + r.stop] for rows, r in zip(outputs, ranks, strict=True)]

    parameters = [*weights, *ups]
    if kept is not None and all(same_place(p.data, place) for p, place in zip(parameters, places(kept), strict=True)):
        wide = kept
    else:
        wide = first.new_zeros(shape[0], stride)[:, :columns]
        for parameter, place in zip(parameters, places(wide), strict=True):
            place.copy_(parameter.data)
    for parameter, place in zip(parameters, places(wide), strict=True):
        parameter.data = place
        fused[names[id(parameter)]] = place
    return wide


def same_place(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def joined(parameters: Sequence[nn.Parameter], names: dict[int, str], fused: dict[str, Tensor]) -> Tensor:
    """Return one tensor whose parts the parameters are; it is made now unless they are adjacent already."""
    if len(parameters) == 1:
        return parameters[0]
    whole = adjacent([p.data for p in parameters])
    if whole is None:
        whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, slices([p.shape[0] for p in parameters]), strict=True):
        parameter.data = whole[part]
        fused[names[id(parameter)]] = whole[part]
    return whole


def slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(_consecutive(sizes))


def _consecutive(sizes: Sequence[int]) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size
