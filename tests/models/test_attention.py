"""Dense attention against loops in float64, in both of its ways of computing; windows; the refusal without a layout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.errors import EngineError, ModelError
from lockstep.models import blockwise
from lockstep.models.attention import (
    AttentionKind,
    causal_attention,
    causal_mask,
    dense_attention,
    require_packable,
    wide_product,
)
from tests.learner.models import FAMILIES, plain, tokens, twin

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
KINDS = {
    "plain": AttentionKind(0.3),
    "window": AttentionKind(0.3, window=5),
    "window of one": AttentionKind(0.3, window=1),
    "softcap": AttentionKind(0.3, softcap=0.7),
    "sinks": AttentionKind(0.3, sinks_H=SINKS),
    "all": AttentionKind(0.3, window=7, softcap=0.7, sinks_H=SINKS),
}


def blocks(count: int, heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(queries + keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    size = 8
    return normal(count, heads, queries, size), normal(count, kv_heads, keys, size), normal(count, kv_heads, keys, size)


def by_definition(query: Tensor, key: Tensor, value: Tensor, seen_NQS: Tensor, kind: AttentionKind) -> Tensor:
    """One query of one head at a time."""
    query, key, value = (x.double() for x in (query, key, value))
    count, heads, queries, size = query.shape
    share = heads // key.shape[1]
    rows = []
    for n in range(count):
        for h in range(heads):
            for q in range(queries):
                scores = key[n, h // share] @ query[n, h, q] * kind.scale
                if kind.softcap is not None:
                    scores = kind.softcap * torch.tanh(scores / kind.softcap)
                weights = torch.where(seen_NQS[min(n, len(seen_NQS) - 1), q], scores.exp(), 0.0)
                sink = kind.sinks_H[h].exp() if kind.sinks_H is not None else 0.0
                rows.append(weights @ value[n, h // share] / (weights.sum() + sink))
    return torch.stack(rows).view(count, heads, queries, size)


def seen(queries: int, keys: int, window: int | None) -> Tensor:
    """Query i stands at key keys - queries + i, and sees itself and at most window - 1 keys before it."""
    offset = keys - queries
    rows = [
        [k <= i + offset and (window is None or k > i + offset - window) for k in range(keys)] for i in range(queries)
    ]
    return torch.tensor(rows)[None]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (9, 9), (4, 13)])
def test_dense_attention_by_definition(kind: AttentionKind, queries: int, keys: int):
    query, key, value = blocks(2, 4, 2, queries, keys, torch.float64)
    mask = None if queries == keys else seen(queries, keys, kind.window)
    ours = dense_attention(query, key, value, mask, kind)
    theirs = by_definition(query, key, value, seen(queries, keys, kind.window), kind)
    torch.testing.assert_close(ours, theirs)
    mix = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    for a, b in zip(
        torch.autograd.grad((ours * mix).sum(), (query, key, value)),
        torch.autograd.grad((theirs * mix).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [KINDS["plain"], KINDS["window"]], ids=["plain", "window"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (220, 330)])
def test_long_blocks_are_computed_alike(kind: AttentionKind, queries: int, keys: int):
    """Past the size at which the fused kernel takes over: row by row the same as short blocks."""
    query, key, value = blocks(1, 4, 2, queries, keys, torch.float32)
    mask = seen(queries, keys, kind.window)
    ours = dense_attention(query, key, value, None if queries == keys else mask, kind)
    for start in range(0, queries, 100):
        span = slice(start, start + 50)
        part = dense_attention(query[:, :, span], key, value, mask[:, span], kind)
        torch.testing.assert_close(ours[:, :, span], part, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_gpu_does_not_round_scores_and_probabilities_to_bf16():
    """Keys are a part of longer rows, as those of an engine are."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key = (torch.randn(3, 2, count, 64, generator=generator, device="cuda").bfloat16() for count in (5, 40))
    for left, right in ((query, key[:, :, :33].transpose(-1, -2)), (query.float().softmax(-1), key.transpose(-1, -2))):
        exact = left.double() @ right.double()
        torch.testing.assert_close(wide_product(left, right).double(), exact, rtol=1e-4, atol=1e-4)
        with_gradient = wide_product(left.clone().requires_grad_(), right)
        with_gradient.sum().backward()
        torch.testing.assert_close(with_gradient.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 6), (6, 6), (3, 9)])
def test_causal_masks(window: int | None, queries: int, keys: int):
    assert torch.equal(causal_mask(queries, keys, window, torch.device("cpu")), seen(queries, keys, window))


def test_a_sink_takes_its_share_and_gives_nothing():
    query = key = torch.zeros(1, 1, 1, 4)
    value = torch.ones(1, 1, 1, 4)
    kind = AttentionKind(1.0, sinks_H=torch.tensor([math.log(3.0)]))
    torch.testing.assert_close(dense_attention(query, key, value, None, kind), torch.full((1, 1, 1, 4), 0.25))


def test_a_model_that_is_called_without_a_layout_says_so():
    model = twin(plain("llama"))
    with pytest.raises(EngineError, match="LlamaAttention: the model was called without a token layout"):
        model(input_ids=torch.tensor([tokens(5, 1)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_families_that_are_served_are_accepted(family: str):
    require_packable(plain(family))


def test_other_ways_for_tokens_to_meet_are_refused():
    model = plain("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention"]  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="linear_attention layers, which cannot run on packed sequences"):
        require_packable(model)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 37), (37, 90)])
def test_blocks_of_queries_are_attention_by_definition(
    kind: AttentionKind, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards and backwards, in fp64, in several blocks of which some begin behind the first keys."""
    monkeypatch.setattr(blockwise, "PAIRS", 1)
    monkeypatch.setattr(blockwise, "LEAST", 10)
    query, key, value = blocks(2, 4, 2, queries, keys, torch.float64)
    sinks = None if kind.sinks_H is None else kind.sinks_H.double().detach().requires_grad_()
    kind = replace(kind, sinks_H=sinks)
    ours = blockwise.blockwise_attention(query, key, value, kind.scale, kind.window, kind.softcap, sinks)
    theirs = by_definition(query, key, value, seen(queries, keys, kind.window), kind)
    torch.testing.assert_close(ours, theirs)
    mix = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    for a, b in zip(
        torch.autograd.grad((ours * mix).sum(), inputs), torch.autograd.grad((theirs * mix).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_long_sequences_keep_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 queries with a cap: what is kept for the backward pass is linear in them."""
    query, key, value = blocks(1, 4, 2, 1000, 1000, torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        causal_attention(query, key, value, AttentionKind(0.3, softcap=5.0))
    assert sum(kept) < 8 * query.numel()
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        dense_attention(query, key, value, None, AttentionKind(0.3, softcap=5.0))
    assert sum(kept) > 4 * 1000 * 1000
