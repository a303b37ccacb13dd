"""The learner on one GPU: is each kernel right, what takes the time of an update, and how far from the floor is it.

    python benchmarks/gpu_learner.py --out learner.json                    # everything
    python benchmarks/gpu_learner.py --only numerics layers                # sections by name
    python benchmarks/gpu_learner.py --device cpu --shape tiny             # does the script run

The Qwen2.5-1.5B shape with random weights; one update on 64 prompts x 8 samples of 256 + 512 tokens, each prompt processed once
a group; full training with fp32 masters, and LoRA rank 32 on all linear layers. A section that fails prints why, and the next
one runs. Shares are of the floor in docs/memory_and_floors.md at the rates that are measured first.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from random_model import random_model

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Lora, Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.device import prepare_process
from lockstep.learner.execution import Execution
from lockstep.learner.flash import FLASH, Kernels
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.learner.learner import TorchLearner, _loss_input, base_model, hidden_states
from lockstep.learner.packing import pack
from lockstep.models.attention import NAME, AttentionKind
from lockstep.models.heads import TILES, Head, _TokenLogprobs, head_of, token_logprobs
from lockstep.types import Batch, TrainSequence

GIB = 2**30


# --- measuring ------------------------------------------------------------------------------------------------------
@dataclass
class Bench:
    """What all sections share."""

    device: str
    shape: str
    prompts: int
    samples: int
    prompt: int
    response: int
    flops: float = 790e12
    bandwidth: float = 4.3e12
    failed: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], runs: int = 5) -> float:
        """Median after a warm-up."""
        function()
        times = []
        for _ in range(runs):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    @contextmanager
    def peak(self) -> Iterator[dict[str, float]]:
        """GiB, allocated and reserved."""
        found: dict[str, float] = {}
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield found
        self.wait()
        if self.cuda:
            found |= {
                "allocated": torch.cuda.max_memory_allocated() / GIB,
                "reserved": torch.cuda.max_memory_reserved() / GIB,
            }


class Clock:
    """Marks on the device's own time line."""

    def __init__(self, cuda: bool) -> None:
        self._cuda, self._marks = cuda, []

    def mark(self, name: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def add_to(self, totals: dict[str, float]) -> None:
        """Seconds before each mark since the one before it."""
        if self._cuda:
            torch.cuda.synchronize()
        for (_, one), (name, two) in zip(self._marks, self._marks[1:], strict=False):
            elapsed = one.elapsed_time(two) / 1000 if self._cuda else two - one
            totals[name] = totals.get(name, 0.0) + elapsed


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.detach().double() - truth.detach().double()).norm() / (truth.detach().double().norm() + 1e-30))


# --- work -----------------------------------------------------------------------------------------------------------
def sequences_of(bench: Bench, prompts: int | None = None, seed: int = 0) -> list[TrainSequence]:
    draw = random.Random(seed)
    vocab = 900 if bench.shape == "tiny" else 150000
    result = []
    for group in range(prompts or bench.prompts):
        prompt = tuple(draw.randrange(vocab) for _ in range(bench.prompt))
        for _ in range(bench.samples):
            ids = tuple(draw.randrange(vocab) for _ in range(bench.response))
            logprobs = tuple(-11 + draw.random() for _ in ids)
            advantages = (draw.gauss(0, 1),) * len(ids)
            weight = 1 / (bench.samples * (prompts or bench.prompts) * bench.response)
            result.append(TrainSequence(prompt, ids, (True,) * len(ids), logprobs, advantages, weight, group))
    return result


def recipe(bench: Bench, *, lora: bool = False, states: str = "fp32") -> Recipe:
    return Recipe.model_validate(
        {
            "prompts_per_step": bench.prompts,
            "samples_per_prompt": bench.samples,
            "adapter": {"kind": "lora", "rank": 32, "alpha": 64} if lora else {"kind": "none"},
            "optimizer": {"kind": "adamw", "lr": 1e-6, "states": states},
            "update": {"recompute": "none"},
        }
    )


def build(bench: Bench, *, lora: bool = False, dtype: str = "bfloat16") -> Any:
    model = random_model(bench.shape, dtype, bench.device, attention=NAME)
    return attach(model, Lora(rank=32, alpha=64), seed=0) if lora else model


# --- sections -------------------------------------------------------------------------------------------------------
def machine(bench: Bench) -> None:
    """Versions, and the two rates that floors are computed with."""
    import transformers

    bench.facts |= {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if bench.cuda:
        bench.facts["gpu"] = torch.cuda.get_device_name()
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        bench.flops = 2 * 8192**3 / bench.seconds(lambda: torch.mm(a, b, out=out), 20)
        source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        bench.bandwidth = 2 * source.numel() / bench.seconds(lambda: target.copy_(source), 20)
    bench.facts |= {"TFLOP/s": bench.flops / 1e12, "TB/s": bench.bandwidth / 1e12}
    print(json.dumps(bench.facts, indent=1))


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


# --- updates --------------------------------------------------------------------------------------------------------
def floor_of(bench: Bench, model: Any, *, lora: bool, recompute: str) -> tuple[float, float]:
    """Seconds of training and of the optimizer by the formulas of lockstep.plan.floors at the measured rates."""
    from lockstep.plan.floors import ADAMW_BYTES, Machine, Update, Work, train_seconds
    from lockstep.plan.shapes import shape_of_model

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    work = Work.equal(bench.prompts, bench.samples, bench.prompt, bench.response)
    update = Update(trained, adapter=lora, recompute=recompute == "full")
    rates = Machine("measured", bench.flops, bench.bandwidth)
    shape = shape_of_model(base_model(model))
    return train_seconds(shape, work, update, rates), ADAMW_BYTES * trained / bench.bandwidth


def switch(learner: TorchLearner, mode: str, tokens: int) -> None:
    """Another mode on the same learner: a second one's optimizer would hang its hooks on the same parameters."""
    from lockstep.learner.recompute import Selective

    decoder: Any = base_model(learner.model).get_decoder()
    learner.execution = Execution(tokens, mode)  # type: ignore[arg-type]
    if mode == "selective" and not hasattr(decoder, "kept_selective"):
        decoder.kept_selective = Selective(decoder)
    decoder.lockstep_selective = decoder.kept_selective if mode == "selective" else None
    if mode == "full":
        decoder.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        decoder.gradient_checkpointing_disable()
    for layer in decoder.modules():
        if hasattr(layer, "gradient_checkpointing"):
            layer.training = mode == "full"


def phases(bench: Bench, learner: TorchLearner, batch: Batch, loss: Any) -> dict[str, float]:
    """Seconds of an update's parts on the device's time line, and of the host's packing."""
    totals: dict[str, float] = {}
    start = time.perf_counter()
    packed = list(learner._streams(batch.sequences, batch.prefix))
    totals["host: packing"] = time.perf_counter() - start
    base = base_model(learner.model)
    for part in packed:
        clock = Clock(bench.cuda)
        clock.mark("start")
        hidden = hidden_states(base.get_decoder(), part)
        clock.mark("forward")
        logprobs, entropy = token_logprobs(head_of(base), hidden, part.targets_R, batch.temperature)
        clock.mark("head forward")
        members = [batch.sequences[i] for i in part.order]
        inputs = _loss_input(members, part, logprobs, entropy, 0.0)
        total = (inputs.logprobs_T.new_tensor(members[0].weight) * loss(inputs).loss_T).sum()
        clock.mark("loss")
        hidden.register_hook(lambda grad, clock=clock: clock.mark("head backward"))
        total.backward()
        clock.mark("backward")
        clock.add_to(totals)
    clock = Clock(bench.cuda)
    clock.mark("start")
    learner.optimizer.step(1e-6)
    clock.mark("optimizer")
    clock.add_to(totals)
    return totals


def one_update(bench: Bench, learner: TorchLearner, label: str, mode: str, tokens: int, *, lora: bool) -> None:
    loss = build_objective(recipe(bench)).loss
    batch = Batch(tuple(sequences_of(bench)))
    switch(learner, mode, tokens)
    bench.free()
    learner.update(batch, loss)  # compiles for the sizes of this split
    with bench.peak() as peak:
        start = time.perf_counter()
        metrics = learner.update(batch, loss)
        bench.wait()
        seconds = time.perf_counter() - start
    parts = phases(bench, learner, batch, loss)
    train, optimizer = floor_of(bench, learner.model, lora=lora, recompute=mode)
    row = {
        "run": label,
        "recompute": mode,
        "tokens": tokens,
        "seconds": seconds,
        "floor": train + optimizer,
        "share": (train + optimizer) / seconds,
        "tokens/s": metrics["batch/tokens_processed"] / seconds,
        "peak": peak.get("allocated", 0.0),
        "reserved": peak.get("reserved", 0.0),
        "splits": metrics["batch/oom_splits"],
        "phases": parts,
    }
    bench.rows.append(row)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
    print(
        f"{label} {mode} {tokens}: {seconds:.3f} s, floor {row['floor']:.3f} ({row['share']:.0%}), peak {row['peak']:.1f} GiB"
    )
    print(f"   {shown}; sum {sum(parts.values()):.3f}", flush=True)


def updates(bench: Bench, *, lora: bool, states: str = "fp32") -> None:
    learner = TorchLearner(build(bench, lora=lora), recipe(bench, lora=lora, states=states))
    label = "LoRA r32" if lora else f"full, {states} moments"
    print(*learner.notes, sep="\n")
    works = [("none", 8192), ("none", 16384), ("selective", 16384), ("selective", 32768), ("full", 32768)]
    if states != "fp32":
        works = [("selective", 16384)]
    if not bench.cuda:
        works = [(mode, 64) for mode, _ in works[1:4]]
    for mode, tokens in works:
        try:
            one_update(bench, learner, label, mode, tokens, lora=lora)
        except Exception:
            bench.failed.append(f"{label} {mode} {tokens}")
            traceback.print_exc()
            learner.model.zero_grad(set_to_none=True)
            learner.optimizer._adamw.zero_grad()
            bench.free()


def profile(bench: Bench) -> None:
    """Kernels of one micro-batch of 16384 tokens, selective: which take the time, and how busy the GPU is."""
    learner = TorchLearner(build(bench), recipe(bench))
    loss = build_objective(recipe(bench)).loss
    switch(learner, "selective", 16384)
    batch = Batch(tuple(sequences_of(bench, prompts=min(7, bench.prompts))))
    learner.update(batch, loss)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * bench.cuda
    with torch.profiler.profile(activities=activities) as found:
        start = time.perf_counter()
        learner.update(batch, loss)
        bench.wait()
        seconds = time.perf_counter() - start
    averages = found.key_averages()
    key = "self_device_time_total" if bench.cuda else "self_cpu_time_total"
    print(averages.table(sort_by=key, row_limit=35, max_name_column_width=90))
    if bench.cuda:
        busy = sum(entry.self_device_time_total for entry in averages if entry.device_type.name == "CUDA") / 1e6
        print(f"GPU busy {busy:.3f} s of {seconds:.3f} s under the profiler, {metrics_line(learner)}")


def metrics_line(learner: TorchLearner) -> str:
    return f"optimizer step {learner.optimizer_step}, {learner.execution}"


def host(bench: Bench) -> None:
    """Python's share: packing one update without waiting for the device."""
    sequences = sequences_of(bench)
    device = torch.device(bench.device)
    pack(sequences, range(8), share_prompts=True, device=device)
    start = time.perf_counter()
    for first in range(0, len(sequences), 32):
        pack(sequences, range(first, min(first + 32, len(sequences))), share_prompts=True, device=device)
    print(f"packing {len(sequences)} sequences: {(time.perf_counter() - start) * 1e3:.0f} ms")


def table(bench: Bench) -> None:
    print("\n| run | recompute | tokens | s | floor s | share | tokens/s | peak GiB | reserved GiB | OOM splits |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in bench.rows:
        cells = [row["run"], row["recompute"], row["tokens"], f"{row['seconds']:.2f}", f"{row['floor']:.2f}"]
        cells += [f"{row['share']:.0%}", f"{row['tokens/s']:.0f}", f"{row['peak']:.1f}", f"{row['reserved']:.1f}"]
        print("|", " | ".join(str(cell) for cell in [*cells, f"{row['splits']:.0f}"]), "|")
    print("failed:", ", ".join(bench.failed) or "nothing")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "machine": machine,
    "host": host,
    "attention": attention,
    "head": head,
    "layers": layers,
    "numerics": numerics,
    "full": lambda bench: updates(bench, lora=False),
    "lora": lambda bench: updates(bench, lora=True),
    "8bit": lambda bench: updates(bench, lora=False, states="8bit"),
    "profile": profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    small = arguments.shape == "tiny"
    bench = Bench(arguments.device, arguments.shape, *((4, 4, 8, 12) if small else (64, 8, 256, 512)))
    prepare_process(torch.device(arguments.device), None)
    for name in dict.fromkeys(["machine", *arguments.only]):
        print(f"\n=== {name} ===", flush=True)
        start = time.perf_counter()
        try:
            SECTIONS[name](bench)
        except Exception:
            bench.failed.append(name)
            traceback.print_exc()
        bench.free()
        print(f"--- {name}: {time.perf_counter() - start:.1f} s", flush=True)
        if arguments.out:
            arguments.out.write_text(
                json.dumps({"facts": bench.facts, "rows": bench.rows, "failed": bench.failed}, indent=1)
            )
    table(bench)


if __name__ == "__main__":
    main()
