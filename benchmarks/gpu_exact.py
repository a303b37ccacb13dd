"""Exactness on one GPU: the difference between sampled, scored and trained log-probabilities, and what it costs.

    python benchmarks/gpu_exact.py --write       # table into benchmarks/results/gpu_exact.txt
    python benchmarks/gpu_exact.py --runs 1 --rollouts 1 --work lognormal --shape qwen3-1.7b
    python benchmarks/gpu_exact.py --shape gpt-oss-20b --arms 'LoRA, exact' --work fixed lognormal --runs 1 --write

The Qwen2.5-1.5B shape, or another, with random bf16 weights, groups of 8 with a shared prompt of 128 tokens, temperature 1.
Each arm is a process of its own: full training and LoRA of rank 32 (whose up matrices begin with random numbers), with
`numerics.exact` and without. Rollouts are those of gpu_rollout.py: 512 rows of 512 tokens, 512 rows of log-normal lengths (as
rows end, all numbers of rows from 512 to 8 occur), and 8 rows. Every sampled token is compared with the learner's forward pass
of an update, and a part of the replies with the engine's own scores; an update is made after each, so that later rollouts have
other weights. The first rollout of a work warms up: it is not timed, and compared only if `--rollouts` is more than `--runs`.
Large shapes compute activations again. Full training of the 7b shape keeps moments in 8 bits, and its optimizer in main memory
on a GPU that is too small. Mixtures of experts are in family_models.py, with LoRA on attention; where keys and values of 512
rows have no room, a rollout has fewer rows at a time, and refills them. The arm vLLM samples with its own engine; its
log-probabilities are compared with the learner's of the same weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import family_models
from devices import device_name, synchronise
from gpu_rollout import lengths_of, prompts_of
from results_file import RESULTS, header, write_section

WORKS = ("eight", "fixed", "lognormal")
VLLM = "vLLM"
ARMS = ("full, exact", "full", "LoRA, exact", "LoRA", VLLM)
RESULT = RESULTS / "gpu_exact.txt"
PACKAGES = ("torch", "triton", "transformers", "peft", "vllm")
RANK = 32
SCORED = 64
"""Replies of a rollout that the engine scores, too."""
BATCH = 16
"""Replies that it scores together."""


LARGE = 100.0
"""GiB of a GPU that has room for the large shapes as they are."""


def recipe_of(arm: str, shape: str) -> Any:
    from lockstep.config.schema import Recipe

    adapter: dict[str, Any] = {"kind": "none"}
    if arm.startswith("LoRA"):
        targets = {"targets": "attention"} if shape in family_models.SHAPES else {}
        adapter = {"kind": "lora", "rank": RANK, "alpha": 2 * RANK} | targets
    update: dict[str, Any] = {"tokens_per_microbatch": 14336}
    optimizer: dict[str, Any] = {"kind": "adamw", "lr": 1e-6}
    if shape == "7b" or shape in family_models.SHAPES:
        update = {"tokens_per_microbatch": 8192 if room() > LARGE else 4096, "recompute": "full"}
    if shape == "7b" and not arm.startswith("LoRA"):
        optimizer |= {"states": "8bit"} | ({} if room() > LARGE else {"offload": "cpu"})
    exact = {"exact": "exact" in arm}
    return Recipe.model_validate(
        {"numerics": exact, "adapter": adapter, "update": update, "optimizer": optimizer, "steps": 1000}
    )


def model_of(shape: str, layers: int) -> Any:
    """`layers` instead of a mixture's own number; 0 leaves it."""
    from random_model import random_model

    from lockstep.models.attention import NAME

    if shape in family_models.SHAPES:
        family_models.SHAPES[shape]["num_hidden_layers"] = layers or family_models.SHAPES[shape]["num_hidden_layers"]
        return family_models.random_model(shape, "cuda", NAME, cpu=False)
    return random_model(shape, "bfloat16", "cuda", NAME)


def slots_of(shape: str, layers: int) -> int:
    """Rows of a rollout at a time: of the largest shape, those whose keys and values fit."""
    return 512 if shape != "qwen3-30b-a3b" or layers or room() > LARGE else 128


def room() -> float:
    """Memory of the GPU, GiB."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30


class Arm:
    """One model with its engine and learner."""

    def __init__(self, arm: str, shape: str, layers: int) -> None:
        import torch

        from lockstep.build.exactness import settle_exactness
        from lockstep.device import allow_repeatable_products, prepare_process
        from lockstep.learner.adapters import attach
        from lockstep.learner.learner import TorchLearner
        from lockstep.models import exact
        from lockstep.models.fused_layers import fuse_layers
        from lockstep.rollout.paged.engine import PagedEngine

        recipe = recipe_of(arm, shape)
        prepare_process(torch.device("cuda"), None)
        allow_repeatable_products(torch.device("cuda"))
        model = model_of(shape, layers)
        fuse_layers(model)
        self.model = attach(model, recipe.adapter, seed=0)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.02)
        begin = time.perf_counter()
        settle_exactness(self.model, recipe)
        self.test_seconds, self.exact = time.perf_counter() - begin, exact.line()
        self.engine = PagedEngine(self.model, slots=slots_of(shape, layers), stop_ids=frozenset({2}), decode=str)
        self.learner = TorchLearner(self.model, recipe)
        self.engine.load(iter(()), 0)

    def rollout(self, work: str, number: int) -> tuple[float, list[Any]]:
        from lockstep.types import Request, Sampling

        version = self.engine.version
        requests = [
            Request(f"{p}/{s}", tuple(ids), str(p), 1000 * number + 17 * p + s, Sampling(n, ignore_eos=True), version)
            for p, (ids, row) in enumerate(zip(prompts_of(work, number), lengths_of(work), strict=True))
            for s, n in enumerate(row)
        ]
        synchronise()
        begin = time.perf_counter()
        self.engine.submit(requests)
        done = list(self.engine.completed())
        return time.perf_counter() - begin, done

    def scored(self, done: Sequence[Any]) -> dict[str, float]:
        """Compare replies with the engine's scores of them."""
        chosen = done[:: max(1, len(done) // SCORED)][:SCORED]
        gaps: list[float] = []
        for start in range(0, len(chosen), BATCH):
            part = chosen[start : start + BATCH]
            rows = self.engine.score([(*d.request.prompt_ids, *d.ids) for d in part])
            for d, row in zip(part, rows, strict=True):
                gaps += [abs(a - b) for a, b in zip(d.logprobs, row[len(d.request.prompt_ids) - 1 :], strict=True)]
        return summary(gaps)

    def trained(self, done: Sequence[Any]) -> tuple[float, dict[str, float]]:
        """Make an update on the replies; compare its forward pass with what was sampled."""
        from lockstep.types import Batch, LossInput, LossOutput, TrainSequence

        sequences = tuple(
            TrainSequence(
                d.request.prompt_ids, d.ids, (True,) * len(d.ids), d.logprobs,
                ((-1.0) ** i,) * len(d.ids), 1 / len(done) / len(d.ids), int(d.request.group),
            )
            for i, d in enumerate(sorted(done, key=lambda d: d.request.id))
        )  # fmt: skip
        gaps: list[Any] = []

        def loss(given: LossInput) -> LossOutput:
            gaps.append((given.logprobs_T.detach() - given.rollout_logprobs_T).abs())
            return LossOutput(-(given.logprobs_T - given.old_logprobs_T).exp() * given.advantages_T)

        synchronise()
        begin = time.perf_counter()
        self.learner.update(Batch(sequences), loss)
        synchronise()
        seconds = time.perf_counter() - begin
        self.engine.load(iter(()), self.learner.version)
        return seconds, summary([gap for part in gaps for gap in part.tolist()])


def summary(gaps: Sequence[float]) -> dict[str, float]:
    return {"tokens": len(gaps), "mean": sum(gaps) / len(gaps), "max": max(gaps), "differing": sum(g > 0 for g in gaps)}


def together(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    tokens = sum(p["tokens"] for p in parts)
    return {
        "tokens": tokens,
        "mean": sum(p["mean"] * p["tokens"] for p in parts) / tokens,
        "max": max(p["max"] for p in parts),
        "differing": sum(p["differing"] for p in parts),
    }


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Sample with vLLM as gpu_rollout.py sets it up, and score the replies with a learner of the same weights."""
    from gpu_rollout import vllm_engine, vllm_rollout

    from lockstep.config.schema import Recipe
    from lockstep.learner.learner import TorchLearner
    from lockstep.models.fused_layers import fuse_layers

    model = model_of(args.shape, args.layers)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = vllm_engine(folder, "bfloat16", "v2", share=0.35)
    result: dict[str, Any] = {"device": device_name(), "line": "", "works": {}}
    done = []
    for work in args.work:
        vllm_rollout(engine, work, 0)
        runs = [vllm_rollout(engine, work, number) for number in range(1, args.runs + 1)]
        tokens = sum(len(ids) for _, ids, _ in runs[0][1])
        result["works"][work] = {"seconds": [seconds for seconds, _ in runs], "tokens": tokens, "updates": []}
        done += [reply for _, replies in runs[: args.rollouts] for reply in replies]
    fuse_layers(model)
    recipe = Recipe.model_validate({"steps": 1, "optimizer": {"kind": "adamw", "states": "8bit"}})
    learner = TorchLearner(model, recipe)
    gaps: list[float] = []
    for start in range(0, len(done), 64):
        part = done[start : start + 64]
        for (prompt, _, logprobs), row in zip(part, learner.logprobs([(*p, *i) for p, i, _ in part]), strict=True):
            gaps += [abs(a - b) for a, b in zip(logprobs, row[len(prompt) - 1 :], strict=True)]
    return result | {"trained": summary(gaps), "scored": None}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from lockstep.models import exact

    if args.arm == VLLM:
        return vllm(args)
    arm = Arm(args.arm, args.shape, args.layers)
    result: dict[str, Any] = {"device": device_name(), "line": arm.exact, "test": arm.test_seconds, "works": {}}
    trained, scored = [], []
    for work in args.work:
        seconds, updates, tokens = [], [], 0
        for number in range(args.runs + 1):  # the first one captures
            took, done = arm.rollout(work, number)
            seconds += [took] if number else []
            tokens = sum(len(d.ids) for d in done)
            if number > args.runs - args.rollouts:
                scored.append(arm.scored(done))
                took, found = arm.trained(done)
                updates.append(took)
                trained.append(found)
        result["works"][work] = {"seconds": seconds, "tokens": tokens, "updates": updates}
        print(args.arm, work, tokens / min(seconds), updates, together(trained), together(scored), flush=True)
    result |= {"trained": together(trained), "scored": together(scored), "replaced": exact.replaced_products()}
    return result


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--arm", arm, "--arm-out", file.name, "--runs", str(args.runs)]
        command += [
            "--rollouts",
            str(args.rollouts),
            "--shape",
            args.shape,
            "--layers",
            str(args.layers),
            "--work",
            *args.work,
        ]
        done = subprocess.run(command, check=False, timeout=args.limit)
        text = Path(file.name).read_text()
        return json.loads(text) if text else {"failed": done.returncode}


def table(results: dict[str, dict[str, Any]], works: Sequence[str]) -> list[str]:
    lines = [
        "| arm | " + " | ".join(f"{work}, tok/s" for work in works) + " | update, s | compared with the learner "
        "| mean, max, differing | with the engine's scores | mean, max, differing |",
        "| --- " * (len(works) + 6) + "|",
    ]
    for arm, result in results.items():
        if "failed" in result:
            lines.append(f"| {arm} | failed with {result['failed']} |")
            continue
        found = [result["works"][work] for work in works]
        speeds = " | ".join(f"{w['tokens'] / statistics.median(w['seconds']):,.0f}" for w in found)
        update = " / ".join(f"{min(w['updates']):.2f}" if w["updates"] else "–" for w in found)
        gaps = " | ".join(
            f"{g['tokens']:,} tokens | {g['mean']:.2g}, {g['max']:.2g}, {g['differing']:,}" if g else "– | –"
            for g in (result["trained"], result["scored"])
        )
        lines.append(f"| {arm} | {speeds} | {update} | {gaps} |")
    lines.append("")
    for arm, result in results.items():
        if result.get("line"):
            several = result["replaced"]
            lines.append(f"{arm}: {result['line']}; tested in {result['test']:.1f} s; {len(several)} products in order")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, help="run one arm in this process")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--arm-out", default="/dev/stdout")
    parser.add_argument("--runs", type=int, default=2, help="rollouts of each work that are timed")
    parser.add_argument(
        "--rollouts", type=int, default=2, help="rollouts of each work that are compared: the last ones"
    )
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--layers", type=int, default=0, help="layers of a mixture of experts, instead of all")
    parser.add_argument("--limit", type=float, default=280)
    parser.add_argument("--work", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--out", default="gpu_exact.json")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the table to a file, {RESULT.name}")
    args = parser.parse_args()
    if args.arm:
        Path(args.arm_out).write_text(json.dumps(measure(args)))
        return
    results: dict[str, Any] = {}
    for arm in args.arms:
        results[arm] = run_arm(arm, args)
        where = next((result["device"] for result in results.values() if "device" in result), "no device")
        lines = [*header(__file__, where, PACKAGES), "", *table(results, args.work)]
        Path(args.out).write_text(json.dumps(results, indent=1))
        if args.write:  # after each arm, in case that the next takes too long
            write_section(args.write, args.shape + (f", {args.layers} layers" if args.layers else ""), lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
