"""The sections of gpu_learner.py that ask whether each kernel is right and how fast: attention, head, layers, whole passes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from learner_bench import Bench, build, error, recipe, sequences_of

from lockstep.algorithms.build import build_objective
from lockstep.learner.flash import FLASH, Kernels
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.learner.learner import TorchLearner
from lockstep.models.attention import AttentionKind
from lockstep.models.heads import TILES, Head, _TokenLogprobs, token_logprobs
from lockstep.types import Batch, TrainSequence


def attention(bench: Bench) -> None:
    """One layer's attention over a micro-batch: errors against float64, and seconds, flash and dense."""
    heads, kv, size = (12, 2, 128) if bench.cuda else (4, 2, 16)
    dense = Kernels(lambda query: False, FLASH.forward, FLASH.backward)
    device = torch.device(bench.device)
    for groups, exact in ((1, True), (4, False)):
        branches = [Branch(bench.prompt, (bench.response - 1,) * bench.samples) for _ in range(groups)]
        total = sum(branch.tokens for branch in branches)
        shapes = [(heads, total, size), (kv, total, size), (kv, total, size), (total, heads, size)]
        inputs = [torch.randn(*s, device=device).bfloat16() for s in shapes]

        def run(kernels: Kernels, dtype: torch.dtype, branches: Any = branches, inputs: Any = inputs) -> list[Tensor]:
            layout = PackedLayout(branches, device, prompts_first=True, kernels=kernels)
            query, key, value, mix = (x.to(dtype).requires_grad_() for x in inputs)
            output = layout.attend(0, query, key, value, AttentionKind(size**-0.5))
            return [output, *torch.autograd.grad(output, (query, key, value), mix.detach())]

        if exact:
            truth = run(dense, torch.float64)
            for name, kernels in (("flash", FLASH), ("dense", dense)):
                found = [f"{error(x, t):.2e}" for x, t in zip(run(kernels, torch.bfloat16), truth, strict=True)]
                print(f"{name}: relative error of output, dq, dk, dv against float64: {found}")
            del truth
        both = {n: bench.seconds(lambda k=k: run(k, torch.bfloat16)) for n, k in (("flash", FLASH), ("dense", dense))}
        pairs = groups * (bench.prompt**2 / 2 + bench.samples * bench.response * (bench.prompt + bench.response / 2))
        floor = 3.5 * 4 * heads * size * pairs / bench.flops
        for name, found in both.items():
            print(
                f"{name}, {total} tokens, forward and backward: {found * 1e3:.2f} ms ({floor / found:.0%} of the floor)"
            )
        bench.free()


def head(bench: Bench) -> None:
    """The head over a micro-batch's rows: errors against float64, and seconds, fused and by tiles."""
    rows, vocab, hidden = (16384, 151936, 1536) if bench.cuda else (64, 1024, 64)
    states = torch.randn(rows, hidden, device=bench.device).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, hidden, device=bench.device) * 0.03).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=bench.device)
    mix = torch.randn(rows, device=bench.device)
    tiled: Any = _TokenLogprobs

    def run(function: Callable[..., Any], count: int = rows, frozen: bool = False) -> list[Tensor]:
        matrix = weight.detach() if frozen else weight
        logprobs, entropy = function(states[:count], matrix, targets[:count])
        wanted = (states,) if frozen else (states, weight)
        return [logprobs, entropy, *torch.autograd.grad((logprobs * mix[:count]).sum(), wanted)]

    def fused(h: Tensor, w: Tensor, t: Tensor) -> Any:
        return token_logprobs(Head(w), h, t)

    def by_tiles(h: Tensor, w: Tensor, t: Tensor) -> Any:
        return tiled.apply(h, w, None, t, 1.0, None, 1.0)

    count = min(512, rows)
    wide = states.detach()[:count].double().requires_grad_(), weight.detach().double().requires_grad_()
    logprobs, entropy = tiled.apply(*wide, None, targets[:count], 1.0, None, 1.0)
    truth = [logprobs, entropy, *torch.autograd.grad((logprobs * mix[:count]).sum(), wide)]
    for name, function in (("fused", fused), (f"tiles {TILES.get(bench.device)}", by_tiles)):
        ours = run(function, count)
        ours[2] = ours[2][:count]
        found = [f"{error(x, t):.2e}" for x, t in zip(ours, truth, strict=True)]
        gap = float((ours[0].double() - truth[0]).abs().mean().detach())
        print(f"{name}: relative error of logprobs, entropies, d states, d weight: {found}; mean |d logprob| {gap:.1e}")
    del truth, wide
    floor = 8 * rows * vocab * hidden / bench.flops
    for name, function, frozen in (("fused", fused, False), ("fused, frozen", fused, True), ("tiles", by_tiles, False)):
        with bench.peak() as peak:
            found = bench.seconds(lambda f=function, z=frozen: run(f, rows, z), 3)
        share = floor * (0.75 if frozen else 1.0) / found
        print(f"{name}, {rows} rows: {found * 1e3:.1f} ms ({share:.0%} of 4 products), peak {peak}")
    with torch.no_grad():
        found = bench.seconds(lambda: fused(states, weight, targets), 3)
    print(f"fused, forward alone: {found * 1e3:.1f} ms ({floor / 4 / found:.0%} of one product)")


def layers(bench: Bench) -> None:
    """Fused norms, gates and rotary embeddings: seconds and share of the memory's bandwidth, beside transformers' own."""
    from lockstep.models import layer_kernels

    tokens, hidden, inner, heads, kv, size = (16384, 1536, 8960, 12, 2, 128)
    norm: Any = layer_kernels.RmsNorm
    gate: Any = layer_kernels.SiluGate
    rotary: Any = layer_kernels.Rotary

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    x, weight = tensor(1, tokens, hidden), tensor(hidden)
    a, b = tensor(1, tokens, inner), tensor(1, tokens, inner)
    q = tensor(1, tokens, heads, size).transpose(1, 2).detach().requires_grad_()
    k = tensor(1, tokens, kv, size).transpose(1, 2).detach().requires_grad_()
    cos, sin = tensor(1, tokens, size).detach(), tensor(1, tokens, size).detach()

    def plain_norm() -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def plain_rotary() -> Tensor:
        def turn(one: Tensor) -> Tensor:
            half = torch.cat((-one[..., size // 2 :], one[..., : size // 2]), -1)
            return one * cos[:, None] + half * sin[:, None]

        return torch.cat([turn(q).flatten(), turn(k).flatten()])

    def fused_rotary() -> Tensor:
        return torch.cat([one.flatten() for one in rotary.apply(q, k, cos, sin)])

    works: list[tuple[str, Callable[[], Tensor], Callable[[], Tensor], tuple[Tensor, ...], int]] = [
        ("norm", lambda: norm.apply(x, weight, 1e-6, 0.0, False), plain_norm, (x, weight), 5 * x.numel()),
        ("gate", lambda: gate.apply(a, b), lambda: nn.functional.silu(a) * b, (a, b), 8 * a.numel()),
        ("rotary (with a copy)", fused_rotary, plain_rotary, (q, k), 8 * (q.numel() + k.numel())),
    ]
    for name, fused, plain, inputs, elements in works:
        mix = torch.randn_like(fused())

        def both(function: Callable[[], Tensor], inputs: Any = inputs, mix: Tensor = mix) -> None:
            torch.autograd.grad(function(), inputs, mix)

        gap = error(fused(), plain())
        times = [bench.seconds(lambda f=f: both(f), 10) for f in (fused, plain)]
        share = 2 * elements / bench.bandwidth / times[0]
        print(
            f"{name}: {times[0] * 1e6:.0f} us fused ({share:.0%} of bandwidth), {times[1] * 1e6:.0f} us plain, apart {gap:.1e}"
        )


def numerics(bench: Bench) -> None:
    """Log-probabilities and gradients of one group: learner and transformers in bf16 against transformers in fp32."""
    sequences = sequences_of(bench, prompts=1)
    loss = build_objective(recipe(bench)).loss
    model = build(bench)
    narrow = copy.deepcopy(model)
    wide = copy.deepcopy(model).float()
    for one in (narrow, wide):
        one.config._attn_implementation = "sdpa"
    (truth, grads), (plainly, plain_grads) = (transformers_pass(one, sequences) for one in (wide, narrow))
    learner = TorchLearner(model, recipe(bench))
    print(*learner.notes, sep="\n")
    ours = learner.response_logprobs(sequences, 1.0)
    gap = (torch.tensor([v for row in ours for v in row]) - truth).abs()
    plain_gap = (plainly - truth).abs()
    for label, one in (("learner", gap), ("sdpa bf16", plain_gap)):
        print(f"|d logprob| against fp32, {label}: mean {one.mean():.4f}, max {one.max():.3f}")
    found: dict[str, Tensor] = {}

    def keep(name: str, grad: Tensor) -> None:
        found[name] = grad.detach().float().cpu()

    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: keep(name, grad))
    learner.update(Batch(tuple(sequences)), loss)
    for label, other in (("learner", found), ("sdpa bf16", plain_grads)):
        dot = sum(float((other[n].double() * g.double()).sum()) for n, g in grads.items())
        norms = [sum(float(t.double().norm() ** 2) for t in one.values()) ** 0.5 for one in (other, grads)]
        worst = max((error(other[n], g), n) for n, g in grads.items() if float(g.norm()) > 0)
        print(f"gradients against fp32, {label}: cosine {dot / norms[0] / norms[1]:.6f}, norms {norms}, worst {worst}")


def transformers_pass(model: Any, sequences: list[TrainSequence]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all response tokens, and gradients of the policy loss, one sequence at a time."""
    logprobs: list[Tensor] = []
    model.zero_grad(set_to_none=True)
    for s in sequences:
        ids = torch.tensor([[*s.prompt_ids, *s.ids]], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(-1, ids[0, len(s.prompt_ids) :, None])[:, 0]
        ratio = (own - own.detach()).exp()
        (-s.weight * (ratio * torch.tensor(s.advantages, device=own.device)).sum()).backward()
        logprobs.append(own.detach().cpu())
    grads = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return torch.cat(logprobs), grads
