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


def tiles_of(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """Return tiles as int32 [tiles, 8]: first query, queries, position of the first, then up to where keys lie by which shift:
    two ends and three shifts. Tiles with the most keys come first.
    """
    rows = [
        (piece.start + at, min(QUERIES, piece.tokens - at), piece.position + at, *_shifts(piece))
        for piece in pieces
        for at in range(0, piece.tokens, QUERIES)
    ]
    rows.sort(key=lambda row: -row[2])
    return on_device(np.array(rows, np.int32).reshape(len(rows), FIELDS), device)


def _shifts(piece: Piece) -> tuple[int, int, int, int, int]:
    bounds = [(end, start) for end, start in piece.before if end]
    ends, shifts, begun = [0, 0], [0, 0], 0
    for place, (end, start) in enumerate(bounds):
        ends[place], shifts[place], begun = end, start - begun, end
    if len(bounds) < 2:
        ends[1] = ends[0]
    own = piece.start - piece.position if piece.keys is None else piece.keys
    return ends[0], ends[1], shifts[0], shifts[1], own
