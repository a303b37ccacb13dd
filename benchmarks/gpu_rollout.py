"""Rollouts on one GPU: Lockstep's native engine against vLLM on identical work, with the physical floor of each shape.

    python benchmarks/gpu_rollout.py --write       # table into benchmarks/results/gpu_rollout.txt
    python benchmarks/gpu_rollout.py --cpu         # a tiny version of our arms on a CPU, to try the program out: no figures

Both arms: the Qwen2.5-1.5B shape with random bf16 weights, 64 prompts of 128 tokens x 8 samples, temperature 1, the
log-probability of every sampled token returned, end tokens ignored so that the work is fixed. Three lengths: 512 each;
log-normal with mean 480 and at most 1024, so that few sequences remain at the end; and 8 sequences of 512 alone. Each arm is a
process of its own; what it needs to start is timed apart, the first run of each shape warms up. A ratio is printed only if
both arms returned the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from devices import device_name, peak, synchronise
from results_file import RESULTS, header, write_section

PROMPTS, SAMPLES, PROMPT_TOKENS = 64, 8, 128
WORKS = ("fixed", "lognormal", "eight")
RESULT = RESULTS / "gpu_rollout.txt"
PACKAGES = ("torch", "triton", "transformers", "vllm")


def lengths_of(work: str, *, cpu: bool = False) -> list[list[int]]:
    """New tokens of each sample of each prompt. On a CPU a few short ones."""
    if cpu:
        return [[max(1, tokens // 32) for tokens in row[:4]] for row in lengths_of(work)[:2]]
    if work == "eight":
        return [[512] * 8]
    if work == "fixed":
        return [[512] * SAMPLES for _ in range(PROMPTS)]
    draw = random.Random(7)
    sigma = 0.7
    mean = 480 / math.exp(sigma**2 / 2) * 1.07  # the cut at 1024 takes a little from the mean
    return [
        [max(16, min(1024, round(mean * math.exp(draw.gauss(0, sigma))))) for _ in range(SAMPLES)]
        for _ in range(PROMPTS)
    ]


def prompts_of(work: str, run: int, *, cpu: bool = False) -> list[list[int]]:
    draw = random.Random(run)
    ids = range(100, 500) if cpu else range(1000, 100000)
    return [[draw.choice(ids) for _ in range(PROMPT_TOKENS)] for _ in lengths_of(work, cpu=cpu)]


def floor_seconds(work: str) -> float:
    """Least time for the matrix products and the reads of keys and values, one after the other, at the run's real lengths."""
    from random_model import random_model

    from lockstep.plan.floors import H200, Work, generation
    from lockstep.plan.model_shape import shape_of_model

    shape = shape_of_model(random_model("1.5b", device="meta"))
    groups = tuple((PROMPT_TOKENS, tuple(row)) for row in lengths_of(work))
    return sum(generation(shape, Work(groups), H200))


# --- our arm --------------------------------------------------------------------------------------------------------
def ours(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import torch
    from random_model import random_model

    from lockstep.device import prepare_process
    from lockstep.models.attention import NAME
    from lockstep.rollout.paged.engine import PagedEngine

    device = "cpu" if args.cpu else "cuda"
    prepare_process(torch.device(device), None)
    torch.zeros(1, device=device)
    imported = time.perf_counter()
    model = random_model("tiny" if args.cpu else "1.5b", args.dtype, device, NAME)
    loaded = time.perf_counter()
    engine = PagedEngine(model, slots=512, stop_ids=frozenset({2}), decode=str, fused=not args.unfused)
    engine.load(iter(()), 0)

    def run(work: str, number: int) -> tuple[float, int, list[Any]]:
        from lockstep.types import Request, Sampling

        requests = [
            Request(f"{p}/{s}", tuple(ids), str(p), 1000 * number + 17 * p + s, Sampling(n, ignore_eos=True), 0)
            for p, (ids, row) in enumerate(
                zip(prompts_of(work, number, cpu=args.cpu), lengths_of(work, cpu=args.cpu), strict=True)
            )
            for s, n in enumerate(row)
        ]
        synchronise()
        begin = time.perf_counter()
        engine.submit(requests)
        done = list(engine.completed())
        return time.perf_counter() - begin, sum(len(d.ids) for d in done), done

    result = measure(args, run) | {"device": device_name()}
    result["start"] = {"import": imported - start, "model": loaded - imported}
    result["mismatch"] = mismatch(model, run("fixed", 99)[2])
    if args.profile:
        profile(run)
    result["peak_gib"] = peak()
    return result


def mismatch(model: Any, done: list[Any]) -> dict[str, float]:
    """|Δ log-probability| of 16 samples against a full forward pass of plain transformers over the same weights."""
    import torch

    model.set_attn_implementation("sdpa")
    gaps, device = [], model.device
    with torch.no_grad():
        for completion in done[:: max(1, len(done) // 16)][:16]:
            ids = torch.tensor([[*completion.request.prompt_ids, *completion.ids]], device=device)
            logprobs = model(ids).logits[0, len(completion.request.prompt_ids) - 1 : -1].float().log_softmax(-1)
            expected = logprobs.gather(-1, torch.tensor(completion.ids, device=device)[:, None])[:, 0]
            gaps.append((expected - torch.tensor(completion.logprobs, device=device)).abs())
    model.set_attn_implementation("lockstep")
    gap = torch.cat(gaps)
    return {"mean": float(gap.mean()), "max": float(gap.max())}


def profile(run: Callable[[str, int], Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    for work in ("fixed", "eight"):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            run(work, 5)
        print(work, trace.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))


# --- vLLM -----------------------------------------------------------------------------------------------------------
def vllm_engine(folder: str, dtype: str, variant: str, share: float) -> Any:
    """Its fastest known settings for short rollouts: no compilation, full decode graphs, the V2 runner, flat log-probs."""
    for name, value in {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if variant == "v2" else {}),
    }.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    settings: dict[str, Any] = {}
    if variant != "default":
        settings["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=512,
        gpu_memory_utilization=share,
        enable_prefix_caching=True,
        **settings,
    )


def vllm_rollout(engine: Any, work: str, number: int) -> tuple[float, list[tuple[list[int], list[int], list[float]]]]:
    """Return the seconds, and of each reply prompt, tokens and log-probabilities."""
    from vllm import SamplingParams

    prompts, params = [], []
    for ids, row in zip(prompts_of(work, number), lengths_of(work), strict=True):
        for n in row:
            prompts.append({"prompt_token_ids": ids})
            params.append(
                SamplingParams(
                    temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True
                )
            )
    begin = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    replies = [(p["prompt_token_ids"], o.outputs[0]) for p, o in zip(prompts, outputs, strict=True)]
    return seconds, [
        (ids, list(found.token_ids), [found.logprobs.logprobs[i] for i in found.logprobs.start_indices])
        for ids, found in replies
    ]


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import vllm  # noqa: F401

    imported = time.perf_counter()
    engine = vllm_engine(os.environ["BENCH_MODEL"], args.dtype, args.variant, share=0.5)
    started = time.perf_counter()

    def run(work: str, number: int) -> tuple[float, int, list[Any]]:
        seconds, replies = vllm_rollout(engine, work, number)
        return seconds, sum(len(ids) for _, ids, _ in replies), []

    start_up = {"import": imported - start, "engine": started - imported}
    return measure(args, run) | {"start": start_up, "device": device_name(), "peak_gib": peak()}


def measure(args: argparse.Namespace, run: Callable[[str, int], tuple[float, int, list[Any]]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for work in args.work:
        first, _, _ = run(work, 0)
        seconds, tokens = [], 0
        for number in range(1, args.runs + 1):
            took, tokens, _ = run(work, number)
            seconds.append(took)
        result[work] = {"first": first, "seconds": seconds, "tokens": tokens}
        print(
            work,
            "first",
            round(first, 2),
            "then",
            [round(s, 2) for s in seconds],
            "tok/s",
            round(tokens / min(seconds)),
        )
    return result


# --- both -----------------------------------------------------------------------------------------------------------
def arm(name: str, extra: list[str], folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """One arm in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--arm", name, "--arm-out", file.name, "--runs", str(args.runs), *extra]
        command += ["--dtype", args.dtype, *["--cpu"] * args.cpu]
        done = subprocess.run(
            [*command, "--work", *args.work], env=os.environ | {"BENCH_MODEL": folder}, check=False, timeout=args.limit
        )
        text = Path(file.name).read_text()
        return json.loads(text) if text else {"failed": done.returncode}


def table(results: dict[str, dict[str, Any]], works: list[str], *, cpu: bool) -> list[str]:
    lines = [
        "| work | arm | seconds | tokens/s | share of the floor | ours / it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for work in works:
        mine = results["ours"].get(work)
        for name, result in results.items():
            if work not in result:
                continue
            seconds, tokens = statistics.median(result[work]["seconds"]), result[work]["tokens"]
            same = mine is not None and mine["tokens"] == tokens
            ratio = f"{seconds / statistics.median(mine['seconds']):.2f}x" if same and mine else "other work"
            share = "" if cpu else f"{floor_seconds(work) / seconds:.0%}"  # of an H200, at the full size
            lines.append(
                f"| {work} | {name} | {seconds:.2f} ({min(result[work]['seconds']):.2f}-{max(result[work]['seconds']):.2f}) "
                f"| {tokens / seconds:,.0f} | {share} | {ratio} |"
            )
    return lines


def notes(results: dict[str, dict[str, Any]]) -> list[str]:
    """Of each arm: seconds to start and of the first run of each work, memory, and how far off its log-probabilities are."""
    lines = []
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"{name}: failed with {result['failed']}")
            continue
        start = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in result["start"].items())
        first = ", ".join(f"{work} {found['first']:.2f} s" for work, found in result.items() if work in WORKS)
        line = f"{name}: {start}; first run: {first}; peak {result['peak_gib']:.1f} GiB"
        if gap := result.get("mismatch"):
            line += (
                f"; |log-probability - full forward pass of transformers|: mean {gap['mean']:.2g}, max {gap['max']:.2g}"
            )
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=["ours", "vllm"], help="run one arm in this process")
    parser.add_argument("--arm-out")
    parser.add_argument("--out", default="gpu_rollout.json")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variant", default="v2", choices=["v2", "v1", "default"], help="vLLM's settings")
    parser.add_argument("--variants", nargs="*", default=["v2", "v1"], help="vLLM's settings to try")
    parser.add_argument("--unfused", action="store_true", help="our engine runs the model's own forward pass")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("--cpu", action="store_true", help="a tiny version of our arms on a CPU, to try things out")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the table to a file, {RESULT.name}")
    parser.add_argument("--work", nargs="*", choices=WORKS, default=list(WORKS))
    args = parser.parse_args()
    if args.cpu:
        args.variants = []  # vLLM needs a GPU
        if args.write == RESULT:
            raise SystemExit("a CPU's figures are none: give --write another file")
    if args.arm:
        result = {"ours": ours, "vllm": vllm}[args.arm](args)
        Path(args.arm_out or "/dev/stdout").write_text(json.dumps(result))
        return
    results = {"ours": arm("ours", [], "", args), "ours, unfused": arm("ours", ["--unfused"], "", args)}
    if args.variants:
        from random_model import random_model

        with tempfile.TemporaryDirectory() as folder:
            random_model("1.5b", args.dtype).save_pretrained(folder)
            for variant in args.variants:
                results[f"vLLM {variant}"] = arm("vllm", ["--variant", variant], folder, args)
    where = next((result["device"] for result in results.values() if "device" in result), "no device")
    lines = [*header(__file__, where, PACKAGES), "", *table(results, args.work, cpu=args.cpu), "", *notes(results)]
    Path(args.out).write_text(json.dumps(results, indent=1))
    print("\n".join(lines))
    if args.write:
        write_section(args.write, "rollout", lines)


if __name__ == "__main__":
    main()
