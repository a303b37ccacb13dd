"""The learner on one GPU: is each kernel right, what takes the time of an update, and how far from the floor is it.

    python benchmarks/gpu_learner.py --out learner.json                    # everything
    python benchmarks/gpu_learner.py --only numerics layers                # sections by name
    python benchmarks/gpu_learner.py --device cpu --shape tiny             # does the script run

The Qwen2.5-1.5B shape with random weights; one update on 64 prompts x 8 samples of 256 + 512 tokens, each prompt processed once
a group; full training with fp32 masters, and LoRA rank 32 on all linear layers. A section that fails prints why, and the next
one runs. Shares are of the floor by lockstep.plan.floors at the rates that are measured first.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from learner_bench import Bench, Clock, build, recipe, sequences_of
from learner_kernels import attention, head, layers, numerics

from lockstep.algorithms.build import build_objective
from lockstep.learner.device import prepare_process
from lockstep.learner.execution import Execution
from lockstep.learner.learner import TorchLearner, _loss_input, base_model, hidden_states
from lockstep.learner.packing import pack
from lockstep.models.heads import head_of, token_logprobs
from lockstep.types import Batch


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
        inputs = _loss_input(members, part, logprobs, entropy, batch)
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
        works = [(mode, 64) for mode, _ in works[1:4] or works]
    for mode, tokens in works:
        try:
            one_update(bench, learner, label, mode, tokens, lora=lora)
        except Exception:
            bench.failed.append(f"{label} {mode} {tokens}")
            traceback.print_exc()
            learner.model.zero_grad(set_to_none=True)
            for inner in learner.optimizer._inner:
                inner.optimizer.zero_grad(set_to_none=True)
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
