"""Attention and products in one order: right on a CPU under Triton's interpreter; their bits are a matter of a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lockstep.learner.flash import FLASH, Kernels
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.models import ordered
from lockstep.models.attention import AttentionKind
from lockstep.models.ordered import QUERIES, Piece, tasks_of, tiles_of
from tests.interpreter import interpreted
from tests.models import ordered_reference


@pytest.mark.parametrize(
    "check",
    [
        ordered_reference.attention,
        ordered_reference.windows_and_sinks,
        ordered_reference.parts,
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
    assert tiles_of(pieces, cpu).table.tolist() == [
        [50 + QUERIES, 2, 13 + QUERIES, 3, 13, 0, 0, 37],
        [50, QUERIES, 13, 3, 13, 0, 0, 37],
        [3, 10, 3, 3, 3, 0, 0, 0],
        [0, 3, 0, 0, 0, 0, 0, 0],
    ]
    alone = tiles_of([Piece(7, 4, 20, keys=100)], cpu)
    assert (alone.table.tolist(), alone.keys) == ([[7, 4, 20, 0, 0, 0, 0, 100]], 24)


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


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 2, 128), (4, 4, 64)])
def test_gradients_on_a_gpu_are_those_of_a_dense_softmax_and_repeat(heads: int, kv_heads: int, size: int):
    """As close to fp32 as FlashAttention's are, in the same bits each time, whether exactness is on or not."""
    torch.manual_seed(0)
    branches = [Branch(130, (700, 1, 64)), Branch(70, (129,) * 8)]
    tokens = sum(branch.tokens for branch in branches) + 37
    device = torch.device("cuda")
    streams = [torch.randn(n, tokens, size, device=device).bfloat16() for n in (heads, kv_heads, kv_heads)]
    grad = torch.randn(tokens, heads, size, device=device).bfloat16()
    grad[-37:] = 0  # padding

    def gradients(kernels: Kernels, dtype: torch.dtype, times: int = 1) -> list[tuple[torch.Tensor, ...]]:
        layout = PackedLayout(branches, device, prompts_first=True, kernels=kernels)
        own = [one.to(dtype).requires_grad_() for one in streams]
        out = layout.attend(0, *own, AttentionKind(size**-0.5))
        return [torch.autograd.grad(out, own, grad.to(dtype), retain_graph=True) for _ in range(times)]

    (dense,) = gradients(replace(FLASH, serves=lambda query: False), torch.float32)
    (flash,) = gradients(replace(FLASH, ordered=lambda query: False), torch.bfloat16)
    ours, again = gradients(FLASH, torch.bfloat16, 2)
    assert FLASH.ordered(streams[0].transpose(0, 1))
    for right, theirs, own, repeated in zip(dense, flash, ours, again, strict=True):
        assert float((own.float() - right).norm()) < 1.1 * float((theirs.float() - right).norm())
        assert torch.equal(own, repeated)
