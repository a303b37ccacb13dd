"""Mixtures of experts and other families on one GPU: rollouts beside vLLM on identical work, LoRA updates, and their floors.

    python benchmarks/gpu_moe.py --write           # one call on an H200: all arms of both mixtures
    python benchmarks/gpu_moe.py --shapes phi-3-3.8b gemma-3-1b smollm3-3b --write
    python benchmarks/gpu_moe.py --cpu             # tiny versions of our arms on a CPU, to try the program out: no figures

Shapes of Qwen3-30B-A3B and gpt-oss-20b, and of dense models of other families, with random bf16 weights. Rollouts: 64 prompts
of 128 tokens x 8 samples of 256, end tokens ignored, temperature 1, log-probabilities of the sampled tokens returned. Updates:
LoRA of rank 16 on attention, 64 sequences of 512 tokens. Arms: ours; ours with numerics.exact; ours with gpt-oss's experts in
MXFP4 (adapter.base = mxfp4); ours with adapters of the same rank on experts (adapter.expert_rank), whose B is drawn; ours
without adapters, which only samples; ours with the routes that sampling took replayed in training (update.replay_routing),
which has no rates: its engine is the uncaptured one, and samples 64 replies; vLLM, without adapters too, with the settings of
gpu_rollout.py and weights of its own.
Each arm is a process of its own, and its first run warms up. The floor of a rollout counts all experts' reads that its rows can
reach in every decode step; that of an update 4 FLOP for each active parameter and token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from devices import device_name, peak, power, synchronise
from family_models import MIXTURES, SHAPES, config_of, random_model
from results_file import RESULTS, header, write_section

PROMPTS, SAMPLES, PROMPT, REPLY, ROW, ROWS, RANK = 64, 8, 128, 256, 512, 64, 16
ARMS = {
    "ours": ("ours", []),
    "ours, exact": ("ours", ["--exact"]),
    "ours, adapters on experts": ("ours", ["--experts"]),
    "ours, adapters on experts, exact": ("ours", ["--experts", "--exact"]),
    "ours, experts in MXFP4": ("ours", ["--packed"]),
    "ours, experts in MXFP4, exact": ("ours", ["--packed", "--exact"]),
    "ours, no adapters": ("ours", ["--plain"]),
    "ours, no adapters, experts in MXFP4": ("ours", ["--plain", "--packed"]),
    "ours, routes replayed": ("ours", ["--replay"]),
    "vLLM": ("vllm", []),
    "vLLM, experts in MXFP4": ("vllm", ["--packed"]),
}
RESULT = RESULTS / "gpu_moe.txt"
PACKAGES = ("torch", "triton", "transformers", "vllm")


def work_of(number: int, *, cpu: bool) -> tuple[list[list[int]], int, int]:
    """Prompts, samples of each, and tokens of a reply."""
    draw = random.Random(number)
    count, samples, reply = (2, 2, 8) if cpu else (PROMPTS, SAMPLES, REPLY)
    return [[draw.randrange(10, 500) for _ in range(PROMPT)] for _ in range(count)], samples, reply


def floors(shape: str, arm: str) -> tuple[float, float]:
    """Least seconds of a rollout and of an update on an H200."""
    from lockstep.plan.floors import H200, Work, generation
    from lockstep.plan.model_shape import shape_of_model
    from lockstep.plan.shapes import MXFP4_BYTES

    sizes = shape_of_model(random_model(shape, "meta", "eager", cpu=False))
    if "MXFP4" in arm:
        sizes = replace(sizes, expert_bytes=MXFP4_BYTES)
    active = sizes.body + sizes.head
    rollout = sum(generation(sizes, Work.equal(PROMPTS, SAMPLES, PROMPT, REPLY), H200))
    return rollout, 4.0 * active * ROWS * ROW / H200.flops


# --- arms -----------------------------------------------------------------------------------------------------------
def ours(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from lockstep.build.exactness import settle_exactness
    from lockstep.config.schema import Recipe
    from lockstep.device import prepare_process
    from lockstep.learner.adapters import attach
    from lockstep.learner.learner import TorchLearner
    from lockstep.models import exact
    from lockstep.models.attention import NAME
    from lockstep.models.fused_layers import fuse_layers
    from lockstep.rollout.paged.engine import PagedEngine

    prepare_process(torch.device("cpu" if args.cpu else "cuda"), None)
    model = random_model(args.shape, "cpu" if args.cpu else "cuda", NAME, cpu=args.cpu, packed=args.packed)
    if not args.cpu:
        fuse_layers(model)
    experts = RANK if args.experts else 0
    lora = {"kind": "lora", "rank": RANK, "expert_rank": experts, "targets": "attention"}
    adapter = {"kind": "none"} if args.plain else lora
    optimizer = {"kind": "adamw", "lr": 1e-6}
    numerics = {"exact": args.exact or ("auto" if args.replay else False)}
    replay = {"replay_routing": args.replay}
    given = {"adapter": adapter, "optimizer": optimizer, "numerics": numerics, "update": replay}
    recipe = Recipe.model_validate(given)
    model = attach(model, recipe.adapter, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and "lora_B" in name:  # they begin with zeros, which would hide a wrong sum
                parameter.normal_(std=0.02)
    settle_exactness(model, recipe)
    if args.replay:
        return replayed(model, recipe, cpu=args.cpu)
    engine = PagedEngine(model, slots=512, stop_ids=frozenset({2}), decode=str)
    engine.load(iter(()), 0)

    work = {number: work_of(number, cpu=args.cpu) for number in (*range(args.runs + 1), 99)}

    def rollout(number: int) -> tuple[int, list[Any]]:
        engine.submit(requests_of(number, *work[number]))
        done = list(engine.completed())
        return sum(len(one.ids) for one in done), done

    result: dict[str, Any] = {"rollout": timed(args.runs, lambda number: rollout(number)[0]), "exact": exact.line()}
    if args.plain:
        return result | {"device": device_name(), "peak_gib": peak()}
    learner = TorchLearner(model, recipe)
    done = rollout(99)[1][:: 1 if args.cpu else 8]
    scored = learner.logprobs([(*one.request.prompt_ids, *one.ids) for one in done])
    result["mismatch"] = gaps_of(
        done, [row[len(one.request.prompt_ids) - 1 :] for one, row in zip(done, scored, strict=True)]
    )
    result["update"] = timed(args.runs, lambda number: update(learner, number, cpu=args.cpu))
    return result | {"device": device_name(), "peak_gib": peak()}


def requests_of(number: int, prompts: list[list[int]], samples: int, reply: int) -> list[Any]:
    from lockstep.types import Request, Sampling

    sampling = Sampling(reply, ignore_eos=True)
    return [
        Request(f"{p}/{s}", tuple(ids), str(p), 1000 * number + 17 * p + s, sampling, 0)
        for p, ids in enumerate(prompts)
        for s in range(samples)
    ]


def gaps_of(done: list[Any], rows: Any) -> dict[str, float]:
    """Compare the log-probabilities of replies as sampled with those of the learner."""
    gaps = [abs(a - b) for one, row in zip(done, rows, strict=True) for a, b in zip(one.logprobs, row, strict=True)]
    differing = sum(gap > 0 for gap in gaps)
    return {"mean": statistics.fmean(gaps), "max": max(gaps), "tokens": len(gaps), "differing": differing}


def replayed(model: Any, recipe: Any, *, cpu: bool) -> dict[str, Any]:
    """Compare sampling with training on the same replies: once with the routes that sampling took, once without."""
    from lockstep.algorithms.build import build_objective
    from lockstep.learner.learner import TorchLearner, plain_logprobs
    from lockstep.models import exact
    from lockstep.rollout.build import native_engine
    from lockstep.types import Batch, TrainSequence

    engine = native_engine(model, slots=64, stop_ids=frozenset({2}), decode=str, routes=True)
    engine.load(iter(()), 0)
    prompts, samples, reply = work_of(99, cpu=cpu)
    engine.submit(requests_of(99, prompts[:8], samples, reply))
    done = sorted(engine.completed(), key=lambda one: one.request.id)
    count = sum(len(one.ids) for one in done)
    sequences = [
        TrainSequence(
            one.request.prompt_ids, one.ids, (True,) * len(one.ids), one.logprobs, (1.0,) * len(one.ids), 1 / count,
            int(one.request.group), routes=one.routes,
        )
        for one in done
    ]  # fmt: skip
    whole = plain_logprobs(model, [(*one.request.prompt_ids, *one.ids) for one in done], 8192)
    own = [row[-len(one.ids) :] for one, row in zip(done, whole, strict=True)]
    learner = TorchLearner(model, recipe)
    found = {
        "mismatch": gaps_of(done, learner.response_logprobs(sequences, 1.0)),
        "mismatch without": gaps_of(done, own),
    }
    metrics = learner.update(Batch(tuple(sequences)), build_objective(recipe).loss)
    found |= {"differ": metrics["routes/differ"], "exact": exact.line()}
    return found | {"device": device_name(), "peak_gib": peak()}


def update(learner: Any, number: int, *, cpu: bool) -> int:
    """Make one update; returns its tokens."""
    from lockstep.algorithms.build import build_objective
    from lockstep.config.schema import Recipe
    from lockstep.types import Batch, TrainSequence

    draw, (rows, length) = random.Random(number), ((4, 32) if cpu else (ROWS, ROW))
    half = length // 2
    sequences = []
    for group in range(rows):
        ids = tuple(draw.randrange(10, 500) for _ in range(length))
        logprobs, advantages = (-6.0,) * half, (draw.choice((-1.0, 1.0)),) * half
        sequences.append(
            TrainSequence(ids[:half], ids[half:], (True,) * half, logprobs, advantages, 1 / (rows * half), group)
        )
    learner.update(Batch(tuple(sequences)), build_objective(Recipe()).loss)
    return rows * length


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    for name, value in {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": dense}}
    engine = LLM(
        model=os.environ["BENCH_MODEL"],
        skip_tokenizer_init=True,
        load_format="dummy",
        hf_overrides=mxfp4 if args.packed else {},
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=512,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=True,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )

    work = [work_of(number, cpu=False) for number in range(args.runs + 1)]

    def rollout(number: int) -> int:
        prompts, samples, reply = work[number]
        asked = SamplingParams(
            temperature=1.0, max_tokens=reply, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True
        )
        given = [{"prompt_token_ids": ids} for ids in prompts for _ in range(samples)]
        outputs = engine.generate(given, [asked] * len(given), use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    return {"rollout": timed(args.runs, rollout), "device": device_name(), "peak_gib": peak()}


def timed(runs: int, work: Any) -> dict[str, Any]:
    """Run a work once, and then `runs` times with the clock."""
    work(0)
    seconds, tokens = [], 0
    with power() as drawn:
        for number in range(1, runs + 1):
            synchronise()
            begin = time.perf_counter()
            tokens = work(number)
            synchronise()
            seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "tokens": tokens, "power": drawn}


# --- both -----------------------------------------------------------------------------------------------------------
def arm(name: str, shape: str, extra: list[str], folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """One arm in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--arm", name, "--shape", shape, "--arm-out", file.name, *extra]
        command += ["--runs", str(args.runs), *["--cpu"] * args.cpu]
        try:
            code = subprocess.run(command, env=os.environ | {"BENCH_MODEL": folder}, timeout=args.limit).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"no result after {args.limit:.0f} s"}
        text = Path(file.name).read_text()
        return json.loads(text) if text else {"failed": f"exit status {code}"}


def table(results: dict[str, dict[str, dict[str, Any]]], *, cpu: bool) -> list[str]:
    lines = ["| shape | work | arm | seconds | tokens/s | share of the floor | ours / it |", "| --- " * 7 + "|"]
    for shape, arms in results.items():
        least = {name: (1.0, 1.0) if cpu else floors(shape, name) for name in arms}
        for place, work in enumerate(("rollout", "update")):
            mine = arms.get("ours", {}).get(work)
            for name, result in arms.items():
                if work not in result:
                    continue
                seconds = statistics.median(result[work]["seconds"])
                ratio = "other work"
                if mine is not None and mine["tokens"] == result[work]["tokens"]:
                    ratio = f"{seconds / statistics.median(mine['seconds']):.2f}x"
                share = "" if cpu else f"{least[name][place] / seconds:.0%}"
                rate = result[work]["tokens"] / seconds
                lines.append(f"| {shape} | {work} | {name} | {seconds:.2f} | {rate:,.0f} | {share} | {ratio} |")
    return lines


def notes(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = []
    for shape, arms in results.items():
        for name, result in arms.items():
            if "failed" in result:
                lines.append(f"{shape}, {name}: {result['failed']}")
                continue
            line = f"{shape}, {name}: peak {result['peak_gib']:.1f} GiB"
            for work in ("rollout", "update"):
                if drawn := result.get(work, {}).get("power"):
                    line += f"; {work} at {drawn['watts']:.0f} of {drawn['most']:.0f} W, {drawn['mhz']:,.0f} MHz"
            if gap := result.get("mismatch"):
                line += f"; |log-probability as sampled - as scored|: mean {gap['mean']:.2g}, max {gap['max']:.2g}, "
                line += f"{gap['differing']:,} of {gap['tokens']:,} tokens differ"
            if gap := result.get("mismatch without"):
                line += f"; with the learner's own routes: mean {gap['mean']:.2g}, max {gap['max']:.2g}"
                line += f" ({result['differ']:.1%} of the routes differ)"
            if result.get("exact"):
                line += f"; {result['exact']}"
            lines.append(line)
    return lines


def publish(results: dict[str, dict[str, dict[str, Any]]], args: argparse.Namespace) -> None:
    """Print what was read so far, and write it if asked."""
    where = next((r["device"] for arms in results.values() for r in arms.values() if "device" in r), "no device")
    lines = [*header(__file__, where, PACKAGES), "", *table(results, cpu=args.cpu), "", *notes(results)]
    print("\n".join(lines), flush=True)
    if args.write:
        write_section(args.write, "experts" if {*results} <= {*MIXTURES} else "dense models", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=["ours", "vllm"], help="run one arm in this process")
    parser.add_argument("--arm-out")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument(
        "--shapes", nargs="*", choices=SHAPES, default=list(MIXTURES), help="the mixtures, if none is named"
    )
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--exact", action="store_true", help="our arm with numerics.exact")
    parser.add_argument("--packed", action="store_true", help="an arm with experts in MXFP4")
    parser.add_argument("--experts", action="store_true", help="our arm with adapters on experts, too")
    parser.add_argument("--plain", action="store_true", help="our arm without adapters")
    parser.add_argument("--replay", action="store_true", help="our arm with the routes of sampling replayed")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240)
    parser.add_argument("--cpu", action="store_true", help="a tiny version of our arm on a CPU, to try things out")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the table to a file, {RESULT.name}")
    args = parser.parse_args()
    if args.cpu and args.write == RESULT:
        raise SystemExit("a CPU's figures are none: give --write another file")
    if args.arm:
        result = {"ours": ours, "vllm": vllm}[args.arm](args)
        Path(args.arm_out or "/dev/stdout").write_text(json.dumps(result))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an arm ends with the program, whatever ends it
    results: dict[str, dict[str, dict[str, Any]]] = {}
    asked = [one for one in args.arms if not args.cpu or one != "vLLM"]
    for name in asked:
        for shape in args.shapes:
            of_mixtures = any(word in name for word in ("exact", "replayed", "on experts"))
            if ("MXFP4" in name and not shape.startswith("gpt")) or (of_mixtures and shape not in MIXTURES):
                continue
            with tempfile.TemporaryDirectory() as folder:
                config_of(shape, cpu=args.cpu).save_pretrained(folder)
                program, extra = ARMS[name]
                results.setdefault(shape, {})[name] = arm(program, shape, extra, folder, args)
            publish(results, args)


if __name__ == "__main__":
    main()
