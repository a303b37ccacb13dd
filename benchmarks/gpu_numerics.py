"""Quantised numerics on one GPU: kernel against CPU, learner against engine, and what a step costs beside bf16.

    python benchmarks/gpu_numerics.py --write        # kernel, agreement, steps of full training and LoRA; into the results
    python benchmarks/gpu_numerics.py --parts agreement --shape tiny --cpu

kernel: the Triton kernel's bits against the CPU's, and its bytes a second. agreement: mean |Δlogp| of learner and paged engine on
the Qwen2.5-1.5B shape with random weights; beside it what quantisation changes, and how far the learner is from itself when each
attention output gets relative noise of bf16's size (the least that two kernels differ by). steps: gpu_step.py's step with
numerics.train set, each in a process of its own. `--write` writes each part's table to benchmarks/results/gpu_numerics.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from devices import device_name
from results_file import RESULTS, header, write_section

NUMERICS = ("mxfp4-w4a4", "mxfp4-w4a16", "nvfp4-w4a4")
PARTS = ("kernel", "agreement", "steps")
RESULT = RESULTS / "gpu_numerics.txt"
PACKAGES = ("torch", "triton", "transformers")


# --- kernel ---------------------------------------------------------------------------------------------------------
def kernel(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from lockstep.numerics.formats import fake_quantise

    result: dict[str, Any] = {"equal": True}
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((512, 1536), (37, 8960), (11, 70), (3, 5)):
            powers = torch.randint(-10, 10, (shape[0], 1), generator=generator)
            x = (torch.randn(shape, generator=generator) * torch.exp2(powers)).to(dtype)
            x[0, :3] = torch.tensor([torch.finfo(dtype).max, 0.0, -torch.finfo(dtype).smallest_normal / 2]).to(dtype)
            for kind, scale, per_row in (
                ("mxfp4", "floor", False),
                ("mxfp4", "rceil", False),
                ("mxfp4", "ceil", False),
                ("nvfp4", "floor", False),
                ("nvfp4", "floor", True),
            ):
                expected = fake_quantise(x, kind, scale=scale, per_row=per_row)
                found = fake_quantise(x.cuda(), kind, scale=scale, per_row=per_row).cpu()
                if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                    wrong = int((found != expected).sum())
                    result["equal"] = False
                    print(f"kernel: {kind} {scale} {per_row} {dtype} {shape}: {wrong} numbers differ", file=sys.stderr)
    for name, shape in {"activations 16384 x 1536": (16384, 1536), "activations 256 x 1536": (256, 1536)}.items():
        for kind in ("mxfp4", "nvfp4"):
            x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            out = torch.empty_like(x)
            seconds = timed(lambda k=kind, x=x, out=out: fake_quantise(x, k, per_row=True, out=out))
            result[f"{kind}, {name}"] = {"microseconds": seconds * 1e6, "GB/s": 2 * x.nbytes / seconds / 1e9}
    return result


def timed(run: Callable[[], Any], repeats: int = 50) -> float:
    import torch

    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


# --- agreement ------------------------------------------------------------------------------------------------------
def agreement(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from random_model import SHAPES, random_model

    from lockstep.config.schema import Recipe
    from lockstep.device import prepare_process
    from lockstep.learner.learner import TorchLearner
    from lockstep.learner.rounding import shaken
    from lockstep.models.attention import NAME
    from lockstep.rollout.paged.engine import PagedEngine
    from lockstep.types import Forward

    device, dtype = ("cpu", "float32") if args.cpu else ("cuda", "bfloat16")
    prepare_process(torch.device(device), None)
    model = random_model(args.shape, dtype, device, NAME)
    spread(model)
    learner = TorchLearner(model, Recipe())
    engine = PagedEngine(model, slots=32, stop_ids=frozenset(), decode=str)
    draw = torch.Generator().manual_seed(0)
    size = (args.sequences, args.length)
    rows = torch.randint(0, SHAPES[args.shape]["vocab"], size, generator=draw).tolist()
    sequences = [tuple(row) for row in rows]
    plain = learner.logprobs(sequences)
    result: dict[str, Any] = {}
    for numeric in ("", *NUMERICS):
        report = engine.set_forward(Forward(numeric))
        ours, theirs = learner.logprobs(sequences, numeric), engine.score(sequences)
        with shaken(model, attention=True):
            moved = learner.logprobs(sequences, numeric)
        result[numeric or "plain"] = {
            "layers": report.quantised_layers,
            "fused decoding": engine._step._fused is not None,
            "learner - engine": gap(ours, theirs),
            "learner - itself, shaken": gap(ours, moved),
            "from plain": gap(ours, plain),
        }
    engine.set_forward(Forward())
    result["plain again"] = gap(engine.score(sequences), plain)
    return result


def spread(model: Any) -> None:
    """Distributions far from uniform, as a trained model's: transformers' initialisation gives logits near 0."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
                parameter.mul_(2)
            elif "norm" in name and "layers" not in name:
                parameter.mul_(3)


def gap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> dict[str, float]:
    gaps = sorted(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    return {"mean": math.fsum(gaps) / len(gaps), "median": gaps[len(gaps) // 2], "max": gaps[-1]}


# --- steps ----------------------------------------------------------------------------------------------------------
def steps(args: argparse.Namespace) -> dict[str, Any]:
    from random_model import write_model

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape, device="cpu" if args.cpu else "cuda")
        for work in args.work:
            for numeric in ("", *args.numerics):
                result[f"{work}, {numeric or 'bf16'}"] = step(args, folder, work, numeric)
    for work in args.work:
        plain = result[f"{work}, bf16"]
        for numeric in args.numerics:
            found = result[f"{work}, {numeric}"]
            if "step" in plain and "step" in found:
                found["times bf16"] = {key: found[key] / plain[key] for key in ("step", "generate", "train")}
    return result


def step(args: argparse.Namespace, model: str, work: str, numeric: str) -> dict[str, Any]:
    """Medians over the steps of one run; what it said of numerics; how far its rollouts were from the learner."""
    script = Path(__file__).with_name("gpu_step.py")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, str(script), "--arm", "Lockstep", "--work-name", work, "--arm-out", file.name]
        command += ["--model", model, "--steps", str(args.steps), *(["--cpu"] if args.cpu else [])]
        command += ["--tokens", str(args.tokens)] if args.tokens else []
        command += ["--set", f"numerics.train={numeric}"] if numeric else []
        log = Path(args.out).with_suffix(f".{work}.{numeric or 'bf16'}.log")
        with log.open("w") as stream:
            code = subprocess.run(command, stdout=stream, stderr=stream, timeout=args.limit, check=False).returncode
        if code:
            return {"failed": code, "log": log.read_text()[-1500:]}
        found = json.loads(Path(file.name).read_text())
    medians = {
        key: statistics.median(row[key] for row in found["rows"]) for key in ("step", "generate", "train", "sync")
    }
    metrics = {name: value for name, value in found["metrics"].items() if name.startswith("mismatch/")}
    said = re.findall(r"numerics: .*", log.read_text())
    return {**medians, "peak GiB": found["peak"], "mismatch": metrics, "said": sorted(set(said))}


# --- tables ---------------------------------------------------------------------------------------------------------
def table(part: str, found: dict[str, Any]) -> list[str]:
    return {"kernel": kernel_table, "agreement": agreement_table, "steps": steps_table}[part](found)


def kernel_table(found: dict[str, Any]) -> list[str]:
    equal = "equal the CPU's" if found["equal"] else "DIFFER from the CPU's"
    lines = [f"The Triton kernel's bits {equal}.", "", "| input | us | GB/s |", "| --- | --- | --- |"]
    speeds = ((name, speed) for name, speed in found.items() if name != "equal")
    return lines + [f"| {name} | {speed['microseconds']:.0f} | {speed['GB/s']:.0f} |" for name, speed in speeds]


def agreement_table(found: dict[str, Any]) -> list[str]:
    """Differences of log-probabilities, nats a token."""
    lines = [
        "| numerics | layers | fused decoding | learner - engine, mean (median, max) | learner - itself with noise on attention "
        "| from plain |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in found.items():
        if name == "plain again":
            continue
        gap, shaken, plain = row["learner - engine"], row["learner - itself, shaken"], row["from plain"]
        lines.append(
            f"| {'bf16' if name == 'plain' else name} | {row['layers']} | {'yes' if row['fused decoding'] else 'no'} "
            f"| {gap['mean']:.2g} ({gap['median']:.2g}, {gap['max']:.2g}) | {shaken['mean']:.2g} | {plain['mean']:.3g} |"
        )
    again = found["plain again"]["mean"]
    return [
        *lines,
        "",
        f"Differences of log-probabilities, nats a token; plain once more after all of them: {again:.2g}.",
    ]


def steps_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| work, numerics | step, s | generate | train | sync | peak GiB | step, generate, train: times bf16 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in found.items():
        if "failed" in row:
            lines.append(f"| {name} | failed with {row['failed']} |")
            continue
        times = ", ".join(f"{value:.2f}" for value in row.get("times bf16", {}).values())
        seconds = " | ".join(f"{row[key]:.2f}" for key in ("step", "generate", "train", "sync"))
        lines.append(f"| {name} | {seconds} | {row['peak GiB']:.1f} | {times} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--work", nargs="*", default=["full", "lora"])
    parser.add_argument("--numerics", nargs="*", default=["mxfp4-w4a4"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="of a response, instead of the work's own")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--cpu", action="store_true", help="a tiny version, to try things out; without the kernel")
    parser.add_argument("--limit", type=float, default=280)
    parser.add_argument("--out", default="gpu_numerics.json")
    parser.add_argument(
        "--write", nargs="?", type=Path, const=RESULT, help=f"write the tables to a file, {RESULT.name}"
    )
    args = parser.parse_args()
    if args.cpu and args.write == RESULT:
        raise SystemExit("a CPU's figures are none: give --write another file")
    results: dict[str, Any] = {}
    for part in args.parts:
        if part == "kernel" and args.cpu:
            continue
        results[part] = {"kernel": kernel, "agreement": agreement, "steps": steps}[part](args)
        print(json.dumps({part: results[part]}, indent=1), flush=True)
        Path(args.out).write_text(json.dumps(results, indent=1))
        lines = [*header(__file__, device_name(), PACKAGES), "", *table(part, results[part])]
        print("\n".join(lines), flush=True)
        if args.write:
            write_section(args.write, part, lines)


if __name__ == "__main__":
    main()
