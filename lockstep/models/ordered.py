"""Splits queries into tiles for ordered_attention.py: each tile's place in its sequence, and the places of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.models.host import on_device

QUERIES = 128
"""Queries of a tile."""
FIELDS = 8
"""Numbers that describe a tile."""
BLOCK, TASK = 64, 5
"""Keys of a block whose gradients are added together, and numbers that describe a part of that work."""
ADDED = 512
"""Queries over which one program adds, of keys that many queries see."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence. Example: a response of 5 tokens at 40 in the stream to a prompt of 8 at 12 is
    Piece(40, 5, 8, ((8, 12),)).
    """

    start: int
    """Its first token in the stream of queries."""
    tokens: int
    position: int
    """Position of its first token in its sequence."""
    before: tuple[tuple[int, int], ...] = ()
    """Earlier pieces of its sequence, two at most: position at which each ends, and where it begins in the stream of keys."""
    keys: int | None = None
    """Start of its sequence's keys in a stream of their own; None if queries and keys are one stream."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries of a stream, a tile for each program. Those with the most keys come first."""

    table: Tensor
    """int32 [tiles, 8]: first query, queries, position of the first, then up to where keys lie by which shift: two ends and
    three shifts.
    """
    keys: int
    """Most keys of a tile."""


def tiles_of(pieces: Sequence[Piece], device: torch.device) -> Tiles:
    """Split queries into tiles."""
    rows = [
        (piece.start + at, min(QUERIES, piece.tokens - at), piece.position + at, *_shifts(piece))
        for piece in pieces
        for at in range(0, piece.tokens, QUERIES)
    ]
    rows.sort(key=lambda row: -row[2])
    table = on_device(np.array(rows, np.int32).reshape(len(rows), FIELDS), device)
    return Tiles(table, max((piece.position + piece.tokens for piece in pieces), default=0))


def _shifts(piece: Piece) -> tuple[int, int, int, int, int]:
    bounds = [(end, start) for end, start in piece.before if end]
    ends, shifts, begun = [0, 0], [0, 0], 0
    for place, (end, start) in enumerate(bounds):
        ends[place], shifts[place], begun = end, start - begun, end
    if len(bounds) < 2:
        ends[1] = ends[0]
    own = piece.start - piece.position if piece.keys is None else piece.keys
    return ends[0], ends[1], shifts[0], shifts[1], own


@dataclass(frozen=True, slots=True)
class Tasks:
    """The work of adding gradients of keys over the queries that see them, as int32 on the device."""

    tasks: Tensor
    """[tasks, 5]: first key and keys of a block, first query and the one behind the last, slot for a part of the sum or -1."""
    shared: Tensor
    """[blocks, 4]: first key and keys of a block with several tasks, their first slot and their number."""
    slots: int


def tasks_of(pieces: Sequence[Piece], device: torch.device) -> Tasks:
    """Return the tasks of a stream of pieces, each continuing whole earlier ones. Tasks with the most queries come first."""
    seers: dict[int, list[tuple[int, int]]] = {}
    for piece in (piece for piece in pieces if piece.tokens):
        ends = [0, *(end for end, _ in piece.before)]
        for begin in (begin for before, (end, begin) in zip(ends, piece.before, strict=False) if end > before):
            ranges = seers.setdefault(begin, [])
            if ranges and ranges[-1][1] == piece.start:
                ranges[-1] = ranges[-1][0], piece.start + piece.tokens
            else:
                ranges.append((piece.start, piece.start + piece.tokens))
    tasks: list[tuple[int, ...]] = []
    shared: list[tuple[int, ...]] = []
    slots = 0
    for piece in (piece for piece in pieces if piece.tokens):
        end = piece.start + piece.tokens
        for start in range(piece.start, end, BLOCK):
            count = min(BLOCK, end - start)
            ranges = [(start, end), *seers.get(piece.start, ())]
            parts = [(a, min(a + ADDED, last)) for first, last in ranges for a in range(first, last, ADDED)]
            if len(parts) == 1:
                tasks.append((start, count, *parts[0], -1))
                continue
            shared.append((start, count, slots, len(parts)))
            tasks += [(start, count, *part, slots + place) for place, part in enumerate(parts)]
            slots += len(parts)
    tasks.sort(key=lambda task: task[2] - task[3])
    task_NX, shared_NX = np.array(tasks, np.int32).reshape(-1, TASK), np.array(shared, np.int32).reshape(-1, 4)
    return Tasks(on_device(task_NX, device), on_device(shared_NX, device), slots)
