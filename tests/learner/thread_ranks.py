"""Ranks that are threads of one process: the messages of a run on several workers, without starting any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Room:
    """Where the threads leave messages for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.left: list[object] = [None] * size


class Done:
    def wait(self) -> None:
        """Nothing is under way: the message has arrived."""


class ThreadRanks:
    """Implements lockstep.learner.ranks.Ranks."""

    def __init__(self, room: Room, rank: int, size: int) -> None:
        self._room, self.rank, self.size = room, rank, size
        self.given = 0
        """Elements sent in exchanges."""

    def _meet(self, mine: object) -> list[object]:
        self._room.left[self.rank] = mine
        self._room.barrier.wait()
        found = list(self._room.left)
        self._room.barrier.wait()
        return found

    def all_to_all(self, received: Tensor, sent: Tensor, take: Sequence[int], give: Sequence[int]) -> Done:
        assert (sum(take), sum(give)) == (len(received), len(sent))
        self.given += len(sent)
        pieces = [piece[self.rank] for piece in self._meet([piece.clone() for piece in sent.split(list(give))])]  # type: ignore[index]
        assert [len(piece) for piece in pieces] == list(take)
        received.copy_(torch.cat(pieces))
        return Done()

    def share(self, pieces: Sequence[Tensor]) -> None:
        for piece, found in zip(pieces, self._meet(pieces[self.rank].clone()), strict=True):
            piece.copy_(found)  # type: ignore[arg-type]

    def add(self, tensor: Tensor) -> None:
        found = self._meet(tensor.clone())
        tensor.copy_(torch.stack(found).sum(0))  # type: ignore[arg-type]


def together(size: int, body: Callable[[ThreadRanks], Result]) -> list[Result]:
    """Run `body` for each rank in a thread of its own; returns the results by rank."""
    room = Room(size)

    def one(rank: int) -> Result:
        try:
            return body(ThreadRanks(room, rank, size))
        except BaseException:
            room.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
