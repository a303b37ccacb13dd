"""Attention and products in one order: right on a CPU under Triton's interpreter; their bits are a matter of a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from lockstep.learner.layout import Branch, PackedLayout
from lockstep.models import ordered
from lockstep.models.ordered import QUERIES, Piece, tasks_of, tiles_of
from tests.interpreter import interpreted
from tests.models import ordered_reference


@pytest.mark.parametrize(
    "check",
    [
        ordered_reference.attention,
        ordered_reference.windows_and_sinks,
        ordered_reference.products,
        ordered_reference.gradients,
        ordered_reference.stream_gradients,
    ],
)
def test_kernels_under_the_interpreter(check: Callable[[], None]):
    interpreted(check)


def test_tiles_say_where_keys_are():
    cpu = torch.device("cpu")
    pieces = [Piece(0, 3, 0), Piece(3, 10, 3, ((3, 0),)), Piece(50, QUERIES + 2, 13, ((3, 0), (13, 3)))]
    assert tiles_of(pieces, cpu).tolist() == [
        [50 + QUERIES, 2, 13 + QUERIES, 3, 13, 0, 0, 37],
        [50, QUERIES, 13, 3, 13, 0, 0, 37],
        [3, 10, 3, 3, 3, 0, 0, 0],
        [0, 3, 0, 0, 0, 0, 0, 0],
    ]
    assert tiles_of([Piece(7, 4, 20, keys=100)], cpu).tolist() == [[7, 4, 20, 0, 0, 0, 0, 100]]


def test_tasks_meet_every_pair_once(monkeypatch: pytest.MonkeyPatch):
    """Of a stream of random branches: each query with each key that it sees."""
    draw = random.Random(0)
    for number in range(60):
        monkeypatch.setattr(ordered, "ADDED", draw.choice([16, 50, 512]))
        branches = [
            Branch(draw.randrange(1, 90), tuple(draw.randrange(90) for _ in range(draw.randrange(1, 4))))
            for _ in range(draw.randrange(1, 4))
        ]
        branches.sort(key=lambda branch: not branch.tail)
        root, first = draw.choice([0, 3, 70]), draw.random() < 0.7 or any(len(b.responses) > 1 for b in branches)
        layout = PackedLayout(branches, torch.device("cpu"), root, prompts_first=first)
        tokens = root + sum(branch.tokens for branch in branches) + number % 5
        pieces = layout._pieces(tokens)
        met = torch.zeros(tokens, tokens, dtype=torch.int32)
        tasks = tasks_of(pieces, torch.device("cpu"))
        for start, count, begin, end, _ in tasks.tasks.tolist():
            query, key = torch.arange(begin, end)[:, None], torch.arange(start, start + count)[None, :]
            met[begin:end, start : start + count] += (key <= query).int()
        assert torch.equal(met, ordered_reference.seen_by(pieces).int())
        slots = [slot for *_, slot in tasks.tasks.tolist() if slot >= 0]
        assert sorted(slots) == list(range(tasks.slots))
        assert sum(parts for *_, parts in tasks.shared.tolist()) == tasks.slots
