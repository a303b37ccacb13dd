"""Check of a device for `numerics.exact`: each sampling kernel must equal its counterpart in training, bit by bit.

It takes about a second and needs Triton and a GPU. It runs on random numbers in the shapes of the model's first layer.

Legend: T tokens, H query heads, K key/value heads, D head size, X features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.learner.layout import Branch, PackedLayout
from lockstep.models import exact
from lockstep.models.attention import AttentionKind, kind_of_layer
from lockstep.models.decoder import Decoder
from lockstep.models.exact import adapter_into
from lockstep.models.experts import Experts, Router
from lockstep.models.head_kernels import pick_logprobs, summaries
from lockstep.models.layer_kernels import Rotary, SiluGate
from lockstep.models.norm_kernels import norm_heads, row_norm
from lockstep.models.ordered import Piece, tiles_of
from lockstep.models.ordered_attention import stream_attention
from lockstep.models.ordered_product_kernel import product, tile_of
from lockstep.rollout.paged.ops import TritonOps
from lockstep.rollout.paged.plain import RowNorm, Turn
from lockstep.rollout.paged.state import PAGE, PROGRAMS, PageCache, Rows

PROMPT, LENGTHS = 150, (1, 64, 65, 190)
"""A prompt and the lengths of its responses in the tests of attention."""
LONG = 1000
"""Length of a further response, whose keys have two parts."""
ROWS = 300
"""Rows of the larger products."""
TIMES = 4
"""Backward passes that are compared."""
NARROW = 100
"""Largest window of the tests of attention."""
FEW = 8
EACH = (4, 12, 40)
"""Rows of each expert, on average, in the tests of experts: one for each height of the kernels' tiles."""
MANY = 4096
"""Rows of the test of norms: sums in another order change few numbers once they are rounded."""


@dataclass(frozen=True, slots=True)
class _Shape:
    heads: int
    kv_heads: int
    size: int
    hidden: int
    device: torch.device

    @staticmethod
    def of(decoder: Decoder) -> _Shape:
        weight = decoder.head.weight_VH
        heads = int(decoder.model.config.get_text_config().num_attention_heads)
        return _Shape(heads, decoder.kv_heads, decoder.head_size, weight.shape[1], weight.device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).bfloat16()


@torch.no_grad()
def differing(decoder: Decoder) -> tuple[str, ...]:
    """Return what differs between sampling and training on this device; empty if nothing does."""
    shape = _Shape.of(decoder)
    tests: tuple[Callable[[_Shape, Decoder], Iterator[str]], ...] = (
        _products,
        _attention,
        _norms,
        _head_norms,
        _rows,
        _experts,
        _head,
    )
    with torch.random.fork_rng([shape.device]):
        torch.manual_seed(0)
        return tuple(fault for test in tests for fault in test(shape, decoder))


@torch.no_grad()
def changing(decoder: Decoder) -> str:
    """Return what of a backward pass may give other bits each time on this device; empty if nothing does."""
    shape = _Shape.of(decoder)
    try:
        with exact.on_trial(repeatable=True), torch.random.fork_rng([shape.device]), exact.repeated():
            torch.manual_seed(0)
            return _changing(shape, decoder)
    except RuntimeError as error:  # torch's own reason: a setting that came too late, an operation without such a form
        return f"torch refuses: {str(error).splitlines()[0]}"


def _changing(shape: _Shape, decoder: Decoder) -> str:
    """Compare gradients of attention and of an embedding that are made several times."""
    branches = [Branch(PROMPT, LENGTHS), Branch(PROMPT, LENGTHS[::-1])]
    tokens = sum(branch.prompt + sum(branch.responses) for branch in branches)
    layout = PackedLayout(branches, shape.device, prompts_first=True)
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    query, key, value = streams = [shape.random(count, tokens, shape.size).requires_grad_() for count in heads]
    grad, ids = shape.random(tokens, shape.heads, shape.size), torch.randint(50, (tokens,), device=shape.device)
    table, rows = shape.random(50, shape.hidden).requires_grad_(), shape.random(tokens, shape.hidden)
    attention: list[list[Tensor]] = []
    embedding: list[Tensor] = []
    with torch.enable_grad():
        outputs = [layout.attend(0, query, key, value, kind) for kind in _kinds(shape, decoder)]
        for _ in range(TIMES):
            found = [torch.autograd.grad(one, streams, grad, retain_graph=True) for one in outputs]
            attention.append([gradient for gradients in found for gradient in gradients])
            looked_up = torch.nn.functional.embedding(ids, table).index_select(0, ids)
            embedding += torch.autograd.grad(looked_up, table, rows)
    for name, passes in (("attention", attention), ("an embedding", [[one] for one in embedding])):
        if not all(torch.equal(a, b) for other in passes for a, b in zip(passes[0], other, strict=True)):
            return f"the gradient of {name} changes from pass to pass"
    return ""


def _products(shape: _Shape, decoder: Decoder) -> Iterator[str]:
    """Compare products of few rows and of many: other tiles, the same order."""
    layer = decoder.module.layers[0]
    linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    for size in sorted({tuple(linear.weight.shape) for linear in linears}):
        weight, x = shape.random(*size) * 0.02, shape.random(ROWS, size[1])
        few, many, large = (x.new_empty(count, size[0]) for count in (FEW, ROWS, ROWS))
        product(x[:FEW], weight, None, 1.0, few, tile_of(FEW, size[0]))
        product(x, weight, None, 1.0, many, tile_of(ROWS, size[0]))
        product(x, weight, None, 1.0, large, tile_of(4096, size[0]))
        if not (torch.equal(few, many[:FEW]) and torch.equal(many, large)):
            yield f"products of {size[0]} x {size[1]} depend on the number of rows"
        adapter_into(few[:, :FEW], x[:FEW], weight[:FEW], 0.5)
        adapter_into(many[:, :FEW], x, weight[:FEW], 0.5)
        if not torch.equal(few[:, :FEW], many[:FEW, :FEW]):
            yield f"an adapter's products of {size[1]} inputs depend on the number of rows"


def _attention(shape: _Shape, decoder: Decoder) -> Iterator[str]:
    for kind in _kinds(shape, decoder):
        yield from _attention_of(shape, kind)


def _kinds(shape: _Shape, decoder: Decoder) -> list[AttentionKind]:
    """Return the kinds of attention that the model's layers have, with narrow windows."""
    found = set()
    for layer in decoder.module.layers:
        kind = kind_of_layer(layer.self_attn, decoder.model.config)
        found.add((None if kind.window is None else min(kind.window, NARROW), kind.sinks_H is not None))
    return [
        AttentionKind(shape.size**-0.5, window, None, shape.random(shape.heads) if sunk else None)
        for window, sunk in sorted(found, key=str)
    ]


def _attention_of(shape: _Shape, kind: AttentionKind) -> Iterator[str]:
    """Compare a prompt with responses in one stream, each sequence alone, and the last token of each from pages, by one program
    and by several.
    """
    given, lengths = (kind.scale, kind.window, kind.sinks_H), (*LENGTHS, LONG)
    tokens = PROMPT + sum(lengths)
    query = shape.random(tokens, shape.heads, shape.size) * 2
    keys = [shape.random(tokens, shape.kv_heads, shape.size) for _ in range(2)]
    pieces, at = [Piece(0, PROMPT, 0)], PROMPT
    for length in lengths:
        pieces.append(Piece(at, length, PROMPT, ((PROMPT, 0),)))
        at += length
    packed, _ = stream_attention(query, keys[0], keys[1], tiles_of(pieces, shape.device), *given)
    cache, rows = _pages(shape, lengths)
    last: list[int] = []
    for row, piece in enumerate(pieces[1:]):
        own = [*range(PROMPT), *range(piece.start, piece.start + piece.tokens)]
        tiles = tiles_of([Piece(0, len(own), 0)], shape.device)
        own_query, own_key, own_value = (t[own].contiguous() for t in (query, *keys))
        alone, _ = stream_attention(own_query, own_key, own_value, tiles, *given)
        if not torch.equal(alone, packed[own]):
            yield f"attention over {PROMPT} + {piece.tokens} tokens depends on what is packed beside them"
        pages = cache.take(-(-len(own) // PAGE))
        rows.table_BS[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=shape.device)
        rows.position_B[row] = len(own) - 1
        for held, source in zip((cache.keys[0], cache.values[0]), keys, strict=True):
            for place, page in enumerate(pages):
                part = source[own[place * PAGE : (place + 1) * PAGE]]
                held[page, :, : len(part)] = part.transpose(0, 1)
        last.append(own[-1])
    for programs in (1, 2 if len(last) * shape.kv_heads <= PROGRAMS else 1):
        with exact.on_trial():
            out = TritonOps().attend(_heads(query[last], *(one[last] for one in keys)), rows, cache, 0, kind, programs)
        if not torch.equal(out.view(-1, shape.heads, shape.size), packed[last]):
            yield "attention of a token that is decoded differs from that of the same token in training"


def _pages(shape: _Shape, lengths: Sequence[int]) -> tuple[PageCache, Rows]:
    cache = PageCache(1, shape.kv_heads, shape.size, torch.bfloat16, shape.device)
    cache.allocate(sum(-(-(PROMPT + n) // PAGE) for n in lengths))
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)  # what nothing was written to must not matter
    return cache, Rows.empty(len(lengths), -(-(PROMPT + max(lengths)) // PAGE), 1, shape.device)


def _norms(shape: _Shape, decoder: Decoder) -> Iterator[str]:
    """Compare the engine's sum and norm, with and without room for adapters, with the norm of training."""
    x, residual, weight = (shape.random(*size, shape.hidden) for size in ((MANY,), (MANY,), ()))
    total, normed = torch.empty_like(x), torch.empty_like(x)
    rms = x.new_empty(MANY, dtype=torch.float32)
    row_norm(None, x + residual, weight, 1e-6, total, normed, rms)
    for room in (0, 24, 96):
        sums, found = TritonOps().add_norm(x, residual, RowNorm(weight, 1e-6), room)
        if not (torch.equal(found, normed) and torch.equal(sums, x + residual)):
            yield f"the norm of {shape.hidden} numbers differs between sampling and training"
            return


def _head_norms(shape: _Shape, decoder: Decoder) -> Iterator[str]:
    """Compare the norms of query and key heads."""
    if not hasattr(decoder.module.layers[0].self_attn, "q_norm"):
        return
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.size
    x = shape.random(MANY, (heads + 2 * kv_heads) * size)
    weights = shape.random(size), shape.random(size)
    parts = x.view(MANY, -1, size).split([heads, kv_heads, kv_heads], 1)
    wanted = [parts[0].contiguous(), parts[1].contiguous(), parts[2].clone()]
    for part, weight in zip(wanted[:2], weights, strict=True):
        rows = part.view(-1, size)
        row_norm(None, rows, weight, 1e-6, rows, rows)
    norm_heads(x, *weights, 1e-6, heads, kv_heads)
    if not torch.equal(torch.cat(wanted, 1), x.view(MANY, -1, size)):
        yield f"the norm of heads of {size} differs between sampling and training"


def _rows(shape: _Shape, decoder: Decoder) -> Iterator[str]:
    """Compare the gated activation and the rotary embedding."""
    gate, up = shape.random(FEW, 1024), shape.random(FEW, 1024)
    trained: Any = SiluGate
    if not torch.equal(TritonOps().gate(torch.cat([gate, up], 1)), trained.apply(gate, up)):
        yield "the gated activation differs between sampling and training"
    angle = torch.rand(PAGE, shape.size // 2, device=shape.device) * 6
    cos, sin = (f(angle).bfloat16() for f in (torch.cos, torch.sin))
    cache, rows = _pages(shape, LENGTHS)
    count = len(rows.position_B)
    rows.table_BS[:, 0] = torch.arange(count) + 1
    rows.position_B.copy_(torch.arange(count, device=shape.device) * 7)
    query, key, value = (
        shape.random(count, heads, shape.size) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    kind, at = AttentionKind(shape.size**-0.5), rows.position_B.long()
    wide = [torch.cat([t[at], t[at]], -1)[None] for t in (cos, sin)]
    rotary: Any = Rotary
    turned = [one[0].transpose(0, 1) for one in rotary.apply(*(t.transpose(0, 1)[None] for t in (query, key)), *wide)]
    results = []
    with exact.on_trial():
        for used, new, turn in ((query, key, Turn(cos.float(), sin.float())), (turned[0], turned[1], None)):
            out = TritonOps().attend(_heads(used, new, value), rows, cache, 0, kind, 1, turn=turn)
            results.append((out, cache.keys[0].clone()))
    if not all(map(torch.equal, *results)):
        yield "the rotary embedding differs between sampling and training"


def _heads(query_BHD: Tensor, key_BKD: Tensor, value_BKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query_BHD.transpose(0, 1), key_BKD.transpose(0, 1), value_BKD.transpose(0, 1)


def _experts(shape: _Shape, decoder: Decoder) -> Iterator[str]:
    """Compare the experts of as many tokens as are computed in training with those of fewer: other tiles, the same order."""
    modules = list(decoder.module.modules())  # the first layer may have none
    experts = next((found for found in map(Experts.of, modules) if found is not None), None)
    router = next((found for found in map(Router.of, modules) if found is not None), None)
    if experts is None:
        return
    if router is None:
        yield "the router is of a form that the kernel does not support"
        return
    x = shape.random(MANY, shape.hidden)
    with exact.on_trial():
        _, weight, index = router(x)
        whole = experts(x, index, weight)
        for count in (FEW, *(each * router.weight_EH.shape[0] // router.top for each in EACH)):
            _, few_weight, few_index = router(x[:count])
            if not (torch.equal(few_weight, weight[:count]) and torch.equal(few_index, index[:count])):
                yield "the choice of experts depends on the number of rows"
            elif not torch.equal(experts(x[:count], few_index, few_weight), whole[:count]):
                yield "the experts of a token that is decoded differ from those in training"


def _head(shape: _Shape, decoder: Decoder) -> Iterator[str]:
    """Compare log-probabilities of rows among few others and among many."""
    vocabulary = decoder.head.weight_VH.shape[0]
    logits = shape.random(ROWS, vocabulary) * 4
    ids = torch.randint(vocabulary, (ROWS,), device=shape.device)
    temperature = torch.full((ROWS,), 0.7, device=shape.device)
    results = []
    for count in (FEW, ROWS):
        out = torch.empty(count, device=shape.device)
        peak, mass, _ = summaries(logits[:count], temperature[:count])
        pick_logprobs(logits[:count], ids[:count], temperature[:count], peak, mass, out)
        results.append(out[:FEW])
    if not torch.equal(*results):
        yield "log-probabilities of the head depend on the number of rows"
