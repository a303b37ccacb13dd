"""Attention by merged parts is attention: outputs and gradients against the dense path, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.learner.flash import FLASH, Kernels, merge_
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.models.attention import AttentionKind
from tests.interpreter import interpreted
from tests.learner.flash_reference import REFERENCE

CPU = torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 6, 2, 8
LAYOUTS = {
    "shared": ([Branch(5, (3, 8)), Branch(1, (2, 2, 2)), Branch(12, (0,))], 0, True),
    "with a root": ([Branch(4, (7,)), Branch(9, (1, 0, 5)), Branch(3, (0, 0))], 6, True),
    "no responses": ([Branch(4, (0,)), Branch(2, ())], 3, True),
    "one response each": ([Branch(5, (3,)), Branch(1, (9,)), Branch(7, (0,))], 0, False),
    "one response each, with a root": ([Branch(5, (3,)), Branch(2, (4,))], 2, False),
}


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value [·, T, D] and what the output is multiplied with [T, H, D]."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(HEADS, tokens, SIZE), *[(KEY_HEADS, tokens, SIZE)] * 2, (tokens, HEADS, SIZE)]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]


def layout(name: str, kernels: Kernels) -> tuple[PackedLayout, int]:
    """The layout and its tokens, without padding."""
    branches, root, prompts_first = LAYOUTS[name]
    made = PackedLayout(branches, CPU, root, prompts_first=prompts_first, kernels=kernels)
    return made, root + sum(branch.tokens for branch in branches)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_together_are_dense_attention(name: str, padding: int):
    (flash, tokens), (dense, _) = layout(name, REFERENCE), layout(name, FLASH)
    query, key, value, mix = inputs(tokens + padding)
    mix = mix.detach() * (torch.arange(tokens + padding) < tokens)[:, None, None]  # nothing is read from padding
    kind = AttentionKind(0.3)
    results = []
    for one in (flash, dense):
        output = one.attend(0, query, key, value, kind)
        grads = torch.autograd.grad((output * mix).sum(), (query, key, value))
        results.append((output[:tokens], *grads))
        assert output.isfinite().all()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_parts_of_a_stream_by_hand():
    made = PackedLayout([Branch(5, (3, 8)), Branch(1, (2, 0)), Branch(4, (0,))], CPU, 6, prompts_first=True)
    assert (made.prompt_starts, made.tail_starts) == ([6, 11, 12], [16, 27, 29])
    itself, prompts, root = made._plan(padding=3)
    assert itself.query_spans.bounds.tolist() == itself.key_spans.bounds.tolist() == [0, 6, 11, 12, 16, 19, 27, 29, 32]
    assert (itself.causal, itself.query_spans.longest) == (True, 8)
    assert (prompts.queries, prompts.keys) == (slice(16, 29), slice(6, 12)), "the last branch has no responses"
    assert (prompts.query_spans.bounds.tolist(), prompts.key_spans.bounds.tolist()) == ([0, 11, 13], [0, 5, 6])
    assert (prompts.causal, prompts.query_spans.longest, prompts.key_spans.longest) == (False, 11, 5)
    assert (root.queries, root.keys) == (slice(6, 29), slice(0, 6))
    assert (root.query_spans.bounds.tolist(), root.key_spans.bounds.tolist(), root.causal) == ([0, 23], [0, 6], False)
    assert all(bounds.dtype == torch.int32 for part in (itself, prompts, root) for bounds in (part.query_spans.bounds,))


def test_where_each_response_follows_its_prompt_one_part_is_enough():
    made, tokens = layout("one response each", REFERENCE)
    assert len(made._plan(0)) == 1
    assert made._plan(0)[0].query_spans.bounds.tolist() == [0, 8, 18, 25]
    assert tokens == 25


@pytest.mark.parametrize(
    ("kind", "flash"),
    [
        (AttentionKind(1.0), True),
        (AttentionKind(1.0, window=13), True),  # the longest path is 5 + 8
        (AttentionKind(1.0, window=12), False),
        (AttentionKind(1.0, softcap=2.0), False),
        (AttentionKind(1.0, sinks_H=torch.zeros(HEADS)), False),
    ],
    ids=["plain", "wide window", "narrow window", "softcap", "sinks"],
)
def test_what_the_kernels_do_not_compute_is_dense(kind: AttentionKind, flash: bool):
    used: list[bool] = []

    def counting(*given: object) -> tuple[Tensor, Tensor]:
        used.append(True)
        return REFERENCE.forward(*given)  # type: ignore[arg-type]

    kernels = Kernels(REFERENCE.serves, counting, REFERENCE.backward)
    made = PackedLayout([Branch(5, (3, 8))], CPU, prompts_first=True, kernels=kernels)
    query, key, value, _ = inputs(16)
    made.attend(0, query, key, value, kind)
    assert bool(used) == flash


def test_a_cpu_has_no_flash():
    assert not FLASH.serves(torch.zeros(4, 2, 16, dtype=torch.bfloat16))


# --- merging --------------------------------------------------------------------------------------------------------
def by_kernel() -> None:
    """Slices of longer streams, numbers of heads and sizes that are no powers of two."""
    from lockstep.learner.merge_kernel import merge_by_kernel_

    for heads, size, dtype in ((6, 24, torch.float32), (3, 8, torch.bfloat16)):
        generator = torch.Generator().manual_seed(heads)
        output, more = (torch.randn(9, heads, size, generator=generator) for _ in range(2))
        lse, more_lse = (torch.randn(heads, 9, generator=generator) * 30 for _ in range(2))
        wide, narrow = (x.to(dtype).double() for x in (output, more))
        total = torch.logaddexp(lse.double(), more_lse.double())
        share, rest = ((one.double() - total).exp().T[..., None] for one in (lse, more_lse))
        expected = wide * share + narrow * rest
        results = []
        for function in (merge_, merge_by_kernel_):
            ours, sums = output.to(dtype).clone(), lse.clone()
            function(ours[2:7], sums[:, 2:7], more.to(dtype)[2:7], more_lse[:, 2:7].contiguous())
            tolerance = 1e-6 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours[2:7].double(), expected[2:7], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(sums[:, 2:7].double(), total[:, 2:7], rtol=1e-6, atol=1e-6)
            assert torch.equal(ours[:2], output.to(dtype)[:2])
            assert torch.equal(sums[:, 7:], lse[:, 7:])
            results.append(ours)
        torch.testing.assert_close(*results)


@pytest.mark.slow
def test_the_kernel_merges_as_torch_does():
    interpreted(by_kernel)
