"""Checks of attention and products in order that test_ordered.py runs under Triton's interpreter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.models import exact, ordered, ordered_attention
from lockstep.models.attention import AttentionKind
from lockstep.models.ordered import Piece, tasks_of, tiles_of
from lockstep.models.ordered_attention import stream_attention
from lockstep.models.ordered_gradients import stream_gradients as gradients_of
from lockstep.models.ordered_product_kernel import narrow_product, narrow_tile, product, tile_of
from lockstep.rollout.paged.ops import TritonOps
from lockstep.rollout.paged.state import PAGE, PageCache, Rows

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 16


def stream(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(tokens, heads, SIZE).half() for heads in (HEADS, KV_HEADS, KV_HEADS))
    return query, key, value


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    given = (x.transpose(0, 1)[None].float() for x in (query, key, value))
    return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def dense(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exps of one sequence."""
    query, key, value = (x.float() for x in (query, key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * SIZE**-0.5
    ago = torch.arange(len(query))[:, None] - torch.arange(len(query))
    scores = scores.masked_fill((ago < 0) | (ago >= (window or len(query))), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(query), 1)], -1)
    prob = scores.softmax(-1)[..., : len(query)]
    return torch.einsum("hqk,khd->qhd", prob, value.repeat_interleave(2, 1)), scores.logsumexp(-1)


def attention() -> None:
    """Compare a root, a prompt and two responses, and a sequence apart, with each of them alone."""
    torch.manual_seed(0)
    root, prompt, responses, other = 5, 66, (70, 3), 20
    given = stream(root + prompt + sum(responses) + other)
    at = root + prompt
    seen = ((root, 0), (at, root))
    pieces = [Piece(0, root, 0), Piece(root, prompt, root, ((root, 0),)), Piece(at, 70, at, seen)]
    pieces += [Piece(at + 70, 3, at, seen), Piece(at + 73, other, 0)]
    output, lse = stream_attention(*given, tiles_of(pieces, CPU), SIZE**-0.5)
    sequences = [[*range(at + 70)], [*range(at), *range(at + 70, at + 73)], [*range(at + 73, at + 73 + other)]]
    for places in sequences:
        alone = [x[places].contiguous() for x in given]
        torch.testing.assert_close(output[places].float(), plain(*alone), atol=3e-3, rtol=3e-3)
        again, again_lse = stream_attention(*alone, tiles_of([Piece(0, len(places), 0)], CPU), SIZE**-0.5)
        assert torch.equal(again, output[places])
        assert torch.equal(again_lse, lse[:, places])
    query, key, _ = (x[places].float() for x in given)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * SIZE**-0.5
    scores = scores.masked_fill(~torch.ones(other, other, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(again_lse, scores.logsumexp(-1), atol=2e-3, rtol=2e-3)
    later = tiles_of([Piece(0, other - 7, 7, keys=at + 73)], CPU)  # queries that continue keys of another stream
    rest, _ = stream_attention(given[0][places][7:].contiguous(), *given[1:], later, SIZE**-0.5)
    torch.testing.assert_close(rest, output[places][7:], atol=2e-3, rtol=2e-3)


def windows_and_sinks() -> None:
    """Compare a prompt and two responses with dense attention, and with each sequence alone."""
    torch.manual_seed(0)
    prompt, responses, window = 150, (140, 3), 70  # whole tiles and blocks of keys lie before the windows
    given = stream(prompt + sum(responses))
    sinks = torch.randn(HEADS).half() * 2
    seen = ((prompt, 0),)
    pieces = [Piece(0, prompt, 0), Piece(prompt, 140, prompt, seen), Piece(prompt + 140, 3, prompt, seen)]
    output, lse = stream_attention(*given, tiles_of(pieces, CPU), SIZE**-0.5, window, sinks)
    for places in ([*range(290)], [*range(150), *range(290, 293)]):
        alone = [x[places].contiguous() for x in given]
        tiles = tiles_of([Piece(0, len(places), 0)], CPU)
        again, again_lse = stream_attention(*alone, tiles, SIZE**-0.5, window, sinks)
        assert torch.equal(again, output[places])
        assert torch.equal(again_lse, lse[:, places])
        wanted, logs = dense(*alone, window, sinks)
        torch.testing.assert_close(again.float(), wanted, atol=3e-3, rtol=3e-3)
        torch.testing.assert_close(again_lse, logs, atol=2e-3, rtol=2e-3)


def parts() -> None:
    """Compare sequences of several parts with dense attention, and with their last token as any number of programs decode it."""
    ordered_attention.PART = 128
    torch.manual_seed(0)
    lengths = (1, 64, 128, 129, 130, 257, 500)
    for window, sunk in ((None, False), (None, True), (100, True), (300, False)):
        sinks = torch.randn(HEADS).half() if sunk else None
        cache, rows = PageCache(1, KV_HEADS, SIZE, torch.float16, CPU), Rows.empty(len(lengths), 16, 1, CPU)
        cache.allocate(sum(-(-tokens // PAGE) for tokens in lengths))
        for held in (*cache.keys, *cache.values):
            held.fill_(torch.nan)  # what nothing was written to must not matter
        last, wanted = [], []
        for row, tokens in enumerate(lengths):
            given = stream(tokens)
            output, _ = stream_attention(*given, tiles_of([Piece(0, tokens, 0)], CPU), SIZE**-0.5, window, sinks)
            torch.testing.assert_close(output.float(), dense(*given, window, sinks)[0], atol=4e-3, rtol=4e-3)
            pages = cache.take(-(-tokens // PAGE))
            rows.table_BS[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            rows.position_B[row] = tokens - 1
            for held, numbers in zip((cache.keys[0], cache.values[0]), given[1:], strict=True):
                for place, page in enumerate(pages):
                    part = numbers[place * PAGE : min(place * PAGE + PAGE, tokens - 1)]  # the step writes the last
                    held[page, :, : len(part)] = part.transpose(0, 1)
            last.append([numbers[-1] for numbers in given])
            wanted.append(output[-1])
        heads = [torch.stack(one, 1) for one in zip(*last, strict=True)]
        for splits in (1, 2, 8):
            out = torch.empty(len(lengths), HEADS * SIZE).half()
            TritonOps()._in_order(
                *heads, rows, cache, 0, AttentionKind(SIZE**-0.5, window, None, sinks), splits, None, out
            )
            assert torch.equal(out.view(-1, HEADS, SIZE), torch.stack(wanted))
            assert not cache.arrived.any()


def products() -> None:
    torch.manual_seed(0)
    for rows in (3, 20, 130):
        x, weight, bias = torch.randn(rows, 1300).half(), torch.randn(40, 1300).half() * 0.1, torch.randn(40).half()
        wide = torch.zeros(rows, 50).half()
        product(x, weight, bias, 0.5, wide[:, 5:45], tile_of(rows, 40))
        torch.testing.assert_close(
            wide[:, 5:45].float(), 0.5 * (x.float() @ weight.float().T) + bias, atol=0.02, rtol=5e-3
        )
        assert not wide[:, :5].any()
        assert not wide[:, 45:].any()
        narrow_product(x, weight, 0.5, wide[:, 5:45], narrow_tile(rows))
        torch.testing.assert_close(wide[:, 5:45].float(), 0.5 * (x.float() @ weight.float().T), atol=0.02, rtol=5e-3)


def gradients() -> None:
    """Compare the gradients of a product by the ordered kernel with those of torch's."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 64), torch.randn(24, 64), torch.randn(24)
    grads = []
    for function in (exact._Ordered.apply, F.linear):
        given = [t.half().float().requires_grad_() for t in (x, weight, bias)]
        halves = [t.half() for t in given]
        function(*halves).float().square().sum().backward()
        grads.append([t.grad for t in given])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.2, rtol=0.02)


def stream_gradients() -> None:
    """Compare gradients of shared prompts, one of them with many queries, with those of dense attention in double precision."""
    torch.manual_seed(0)
    ordered.ADDED = 100  # so that the work of some keys is in parts
    for root in (5, 0):
        prompts, tails = (66, 20), ((70, 3, 130), (40,))
        pieces, at, starts = [Piece(0, root, 0)], root, []
        for prompt in prompts:
            starts.append(at)
            pieces.append(Piece(at, prompt, root, ((root, 0),)))
            at += prompt
        for prompt, start, lengths in zip(prompts, starts, tails, strict=True):
            for length in lengths:
                pieces.append(Piece(at, length, root + prompt, ((root, 0), (root + prompt, start))))
                at += length
        pieces.append(Piece(at, 9, 0))
        given = stream(at + 9)
        tiles, tasks = tiles_of(pieces, CPU), tasks_of(pieces, CPU)
        assert tasks.slots
        output, lse = stream_attention(*given, tiles, SIZE**-0.5)
        grad = torch.randn_like(output)
        found = gradients_of(grad, *given, output, lse, tiles.table, tasks, SIZE**-0.5)
        wide = [x.double().requires_grad_() for x in given]
        scores = torch.einsum("qhd,khd->hqk", wide[0], wide[1].repeat_interleave(2, 1)) * SIZE**-0.5
        probs = scores.masked_fill(~seen_by(pieces), -torch.inf).softmax(-1)
        wanted = torch.autograd.grad(
            torch.einsum("hqk,khd->qhd", probs, wide[2].repeat_interleave(2, 1)), wide, grad.double()
        )
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine.double() - theirs).norm() < 2e-3 * theirs.norm()


def seen_by(pieces: list[Piece]) -> Tensor:
    """Which keys of a stream each query sees, from its pieces."""
    tokens = max(piece.start + piece.tokens for piece in pieces)
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for piece in pieces:
        rows, before = slice(piece.start, piece.start + piece.tokens), 0
        for end, begin in piece.before:
            mask[rows, begin : begin + end - before] = True
            before = end
        mask[rows, rows] = torch.ones(piece.tokens, piece.tokens, dtype=torch.bool).tril()
    return mask
