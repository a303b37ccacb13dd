"""Several learners that train together, one per process: the messages between them, and the division of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class Ranks(Protocol):
    """Messages between `size` learners; each call is made by all of them, in the same order."""

    rank: int
    size: int

    def all_to_all(self, received: Tensor, sent: Tensor, take: Sequence[int], give: Sequence[int]) -> Pending:
        """Send `give[r]` elements of `sent` to rank r and receive `take[r]` elements from it, in the order of ranks."""

    def share(self, pieces: Sequence[Tensor]) -> None:
        """Copy each rank's piece to all others: `pieces[r]` is that of rank r."""

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks. Used where at most one rank has something other than 0: exact."""


class TorchRanks:
    """Implements Ranks over the process group of torch.distributed: NCCL between GPUs, gloo between CPU processes."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_to_all(self, received: Tensor, sent: Tensor, take: Sequence[int], give: Sequence[int]) -> Pending:
        work: Pending = dist.all_to_all_single(received, sent, list(take), list(give), async_op=True)
        return work

    def share(self, pieces: Sequence[Tensor]) -> None:
        if not pieces[self.rank].is_cuda:  # gloo knows no lists of unequal pieces
            for source, piece in enumerate(pieces):
                if piece.numel():
                    dist.broadcast(piece, source)
            return
        own = pieces[self.rank]
        others = [own[:0] if rank == self.rank else piece for rank, piece in enumerate(pieces)]
        dist.all_to_all(others, [own[:0] if rank == self.rank else own for rank in range(self.size)])

    def add(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


def deal(items: Sequence[Item], ranks: int) -> list[list[Item]]:
    """Deal micro-batches in rounds: each rank gets at most one a round, and reading round by round keeps their order.

    Sums over micro-batches are taken in that order, so they do not depend on the number of ranks.
    """
    return [list(items[start : start + ranks]) for start in range(0, len(items), ranks)]


def assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Give each tensor an owner, so that all own about as many elements: the largest first, to the rank with the fewest."""
    owned = [0] * ranks
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: equal sizes stay in order
        chosen = owned.index(min(owned))
        owner[name] = chosen
        owned[chosen] += sizes[name]
    return {name: owner[name] for name in sizes}
