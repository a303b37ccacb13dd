"""Attention by merged parts is attention: outputs and gradients against the dense path, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.learner import flash
from lockstep.learner.flash import FLASH, Kernels, merge_
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.learner.packing import pack
from lockstep.models.attention import AttentionKind
from tests.interpreter import interpreted
from tests.learner.batches import make_batch
from tests.learner.flash_reference import REFERENCE
from tests.learner.models import plain, twin

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
    (parts, tokens), (dense, _) = layout(name, REFERENCE), layout(name, FLASH)
    query, key, value, mix = inputs(tokens + padding)
    mix = mix.detach() * (torch.arange(tokens + padding) < tokens)[:, None, None]  # nothing is read from padding
    kind = AttentionKind(0.3)
    results = []
    for one in (parts, dense):
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
        (AttentionKind(1.0, window=12), True),
        (AttentionKind(1.0, softcap=2.0), False),
        (AttentionKind(1.0, window=12, softcap=2.0), False),
        (AttentionKind(1.0, sinks_H=torch.zeros(HEADS, dtype=torch.float64)), True),
    ],
    ids=["plain", "wide window", "narrow window", "softcap", "softcap and window", "sinks"],
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
    if flash:
        assert list(made._parts) == [(16, 12 if kind.window == 12 else None)], "a window that hides nothing is none"


# --- windows and sinks ----------------------------------------------------------------------------------------------
def by_hand(made: PackedLayout, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
    """Attention [T, H, D] token by token, over a list of the tokens that it sees."""
    root = list(range(made._root))
    paths = {tuple(root)}
    for branch, prompt, tail in zip(made._branches, made.prompt_starts, made.tail_starts, strict=True):
        begun = [*root, *range(prompt, prompt + branch.prompt)]
        paths.add(tuple(begun))
        for length in branch.responses:
            paths.add((*begun, *range(tail, tail + length)))
            tail += length
    seen = {path[at]: path[: at + 1] for path in paths for at in range(len(path))}
    rows = []
    for token in range(query.shape[1]):
        keys = list(seen.get(token, (token,)))[-(kind.window or 10**6) :]  # padding sees itself: nobody looks
        wide_key, wide_value = (x[:, keys].repeat_interleave(HEADS // KEY_HEADS, 0) for x in (key, value))
        weights = torch.exp(torch.einsum("hd,hsd->hs", query[:, token], wide_key) * kind.scale)
        total = weights.sum(-1) + (0 if kind.sinks_H is None else kind.sinks_H.exp())
        rows.append(torch.einsum("hs,hsd->hd", weights / total[:, None], wide_value))
    return torch.stack(rows)


def assert_as_by_hand(made: PackedLayout, tokens: int, padding: int, window: int | None, trained: bool | None) -> None:
    """Compare outputs and the gradients of query, key, value and sinks; `trained` None has no sinks."""
    query, key, value, mix = inputs(tokens + padding)
    mix = mix.detach() * (torch.arange(tokens + padding) < tokens)[:, None, None]
    sinks = None if trained is None else torch.linspace(-2, 3, HEADS, dtype=torch.float64, requires_grad=trained)
    kind = AttentionKind(0.3, window=window, sinks_H=sinks)
    wanted = [x for x in (query, key, value, sinks) if x is not None and x.requires_grad]
    results = []
    for output in (made.attend(0, query, key, value, kind), by_hand(made, query, key, value, kind)):
        assert output.isfinite().all()
        results.append((output[:tokens], *torch.autograd.grad((output * mix).sum(), wanted)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("trained", [None, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4, 11])
@pytest.mark.parametrize("name", LAYOUTS)
def test_windows_and_sinks_are_those_of_attention_by_hand(name: str, window: int | None, trained: bool | None):
    made, tokens = layout(name, REFERENCE)
    assert_as_by_hand(made, tokens, 3, window, trained)


def test_the_gradient_of_sinks_is_a_sum_over_blocks_of_queries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flash, "SINK_ROWS", 7)
    made, tokens = layout("shared", REFERENCE)
    assert_as_by_hand(made, tokens, 3, 4, trained=True)


BRANCHES = st.builds(Branch, st.integers(1, 9), st.lists(st.integers(0, 9), max_size=4).map(tuple))


@given(
    branches=st.lists(BRANCHES, min_size=1, max_size=3),
    root=st.integers(0, 9),
    padding=st.integers(0, 3),
    window=st.none() | st.integers(1, 20),
    trained=st.sampled_from([None, False, True]),
)
def test_any_groups_have_any_windows_and_sinks(
    branches: list[Branch], root: int, padding: int, window: int | None, trained: bool | None
):
    ordered = sorted(branches, key=lambda branch: not branch.tail)  # the last have no responses
    made = PackedLayout(ordered, CPU, root, prompts_first=True, kernels=REFERENCE)
    assert_as_by_hand(made, root + sum(branch.tokens for branch in branches), padding, window, trained)


def test_the_keys_of_a_window_by_hand():
    made = PackedLayout([Branch(5, (3, 2)), Branch(4, (1,))], CPU, 2, prompts_first=True, kernels=REFERENCE)
    # root 0 1 | prompts 2-6, 7-10 | responses 11-13, 14-15, 16 | padding 17
    (part,) = made._plan(1, window=4)
    assert (part.causal, part.window, part.queries, part.keys) == (True, 4, slice(0, 18), slice(0, 18))
    assert part.query_spans.bounds.tolist() == [0, 7, 11, 14, 16, 17, 18], (
        "the first prompt is one segment with the root"
    )
    assert part.key_spans.bounds.tolist() == [0, 7, 13, 19, 24, 28, 29]
    assert (part.query_spans.longest, part.key_spans.longest) == (7, 7)
    assert part.copies is not None
    copied = [[0, 1, 7, 8, 9, 10], [4, 5, 6, 11, 12, 13], [4, 5, 6, 14, 15], [8, 9, 10, 16], [17]]
    assert part.copies.rows_S.tolist() == [*range(7), *(row for rows in copied for row in rows)]
    ones = part.copies.summed(torch.ones(29, 1, 1))
    assert ones.flatten().tolist() == [2, 2, 1, 1, 3, 3, 3, 1, 2, 2, 2, *[1] * 7]


@pytest.mark.parametrize("root", [0, 2])
def test_nothing_is_copied_where_each_response_follows_its_prompt(root: int):
    made = PackedLayout([Branch(5, (3,)), Branch(4, (6,))], CPU, root, kernels=REFERENCE)
    (part,) = made._plan(2, window=4)
    bounds = part.query_spans.bounds.tolist()
    if root:
        assert bounds == [0, 10, 20, 22]
        assert part.copies is not None
        assert part.copies.rows_S.tolist() == [*range(10), 0, 1, *range(10, 22)], "the second prompt's root"
    else:
        assert bounds == part.key_spans.bounds.tolist() == [0, 8, 18, 20]
        assert part.copies is None


def test_copies_are_added_in_one_order():
    """What each of 40 replies adds to its prompt's keys cancels in part: another order would give other bits."""
    made = PackedLayout([Branch(6, (2,) * 40)], CPU, prompts_first=True, kernels=REFERENCE)
    (part,) = made._plan(0, window=5)
    assert part.copies is not None
    grad = torch.randn(part.copies.rows_S.numel(), 2, 8, generator=torch.Generator().manual_seed(0)) * 1e3
    expected = torch.zeros(86, 2, 8)
    for row, share in zip(part.copies.rows_S.tolist(), grad, strict=True):
        expected[row] += share
    assert all(torch.equal(part.copies.summed(grad), expected) for _ in range(3))


@pytest.mark.parametrize(("family", "calls"), [("gpt-oss", 3), ("gemma3", 2), ("mistral", 2)])
def test_a_whole_model_has_the_same_gradients(family: str, calls: int):
    """In fp32, against the dense path: sinks and windows of 8 in two layers, of which gpt-oss has the window in one."""
    sequences, results, used = make_batch().sequences, [], []

    def counting(*given: object) -> tuple[Tensor, Tensor]:
        used.append(True)
        return REFERENCE.forward(*given)  # type: ignore[arg-type]

    for kernels in (Kernels(REFERENCE.serves, counting, REFERENCE.backward), FLASH):
        model: Any = twin(plain(family))
        packed = pack(sequences, range(len(sequences)), share_prompts=True, device=CPU, prompts_first=True)
        made = PackedLayout(packed.layout._branches, CPU, prompts_first=True, kernels=kernels)
        given = {"input_ids": packed.ids_T[None], "position_ids": packed.positions_T[None], "use_cache": False}
        states = model.get_decoder()(**given, layout=made).last_hidden_state
        weights = [one for one in model.get_decoder().parameters() if one.requires_grad]
        mix = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
        results.append((states, *torch.autograd.grad((states * mix).sum(), weights)))
    assert len(used) == calls
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.detach().abs().max()))


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
