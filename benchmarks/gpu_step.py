"""One training step on one GPU: Lockstep against TRL with colocated vLLM on identical work, by phases, with the physical floor.

    python benchmarks/gpu_step.py --out step.json                  # full training, 256 + 512 tokens
    python benchmarks/gpu_step.py --work long lora                 # 256 + 1024 tokens; LoRA rank 32 on all linear layers

The Qwen2.5-1.5B shape with random weights, 64 prompts of 256 tokens x 8 samples, end tokens ignored, temperature 1, one update
a step, AdamW at 1e-6 clipped at 1, no KL. Full training keeps fp32 weights under bf16 computation in every arm but "TRL tuned
bf16", which rounds weights and optimizer state to bf16. Lockstep runs its own training loop as `lockstep train` does, proof of
sync included; TRL runs its trainer, once as it comes and with what its manual advises for speed. Each arm is a process of its
own; its first steps are left out. Ratios are printed only between arms that generated and trained the same number of tokens.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, PROMPT_TOKENS, LR, RANK = 64, 8, 256, 1e-6, 32
WARM = 1
WORKS: dict[str, dict[str, Any]] = {
    "full": {"tokens": 512, "lora": False},
    "long": {"tokens": 1024, "lora": False},
    "lora": {"tokens": 512, "lora": True},
}
ARMS: dict[str, dict[str, Any]] = {
    "Lockstep": {},
    "TRL stock": {"gradient_checkpointing": True, "per_device_train_batch_size": 8},
    "TRL tuned": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "use_liger_kernel": True,
        "bf16": True,
        "dtype": "float32",
    },
    "TRL tuned bf16": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "use_liger_kernel": True,
        "bf16": False,
        "dtype": "bfloat16",
    },
}
PHASES = ("generate", "old log-probs", "train", "sync")


def prompt_texts(steps: int) -> list[str]:
    draw = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return ["".join(draw.choices(letters, k=PROMPT_TOKENS)) for _ in range(PROMPTS * steps)]


def score(ids: list[int]) -> float:
    """Differs within each group, and does not depend on what was learnt."""
    return float(sum(ids[:16]) % 2)


# --- our arm --------------------------------------------------------------------------------------------------------
class BenchmarkTask:
    """The fixed prompts; the reward is of the characters, each of which is a token."""

    name, notes = "benchmark", ()

    def __init__(self, steps: int = 8) -> None:
        self._texts = prompt_texts(steps)

    def batch(self, step: int, size: int) -> list[Any]:
        from lockstep.types import Prompt

        rows = range(step * size, step * size + size)
        return [
            Prompt(f"q{i}", ({"role": "user", "content": self._texts[i % len(self._texts)]},), "", "b") for i in rows
        ]

    def heldout(self, role: str, size: int) -> list[Any]:
        return []

    def grade(self, prompt: Any, reply: str) -> Any:
        from lockstep.types import Grade

        return Grade(score(list(reply.encode())))


def lockstep(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import torch

    from lockstep.config.load import load
    from lockstep.loops.run import start_run
    from lockstep.track.writer import read_metrics

    imported = time.perf_counter()
    work = WORKS[args.work_name]
    with tempfile.TemporaryDirectory() as folder:
        recipe = load(
            [
                "name=bench",
                f"runs_dir={folder}",
                f"model={{path: {args.model}, dtype: {'bf16' if not args.cpu else 'fp32'}}}",
                f"adapter={{kind: lora, rank: {RANK}, alpha: {2 * RANK}}}" if work["lora"] else "adapter={kind: none}",
                f"task={{kind: python, path: {__file__}:BenchmarkTask, settings: {{steps: {WARM + args.steps}}}}}",
                f"steps={WARM + args.steps}",
                f"prompts_per_step={PROMPTS if not args.cpu else 2}",
                f"samples_per_prompt={SAMPLES if not args.cpu else 2}",
                f"rollout={{max_tokens: {args.tokens or work['tokens']}, ignore_eos: true, slots: {PROMPTS * SAMPLES}}}",
                f"optimizer={{lr: {LR}}}",
                "update.drop_zero_advantage=false",
                "eval.enabled=false",
                "save.every=1000",
                "track.rollouts_every=1000",
                *args.set,
            ]
        )
        run = start_run(recipe)
        rows = [row.metrics for row in read_metrics(run) if row.step > WARM]
        first = next(row.metrics for row in read_metrics(run) if row.step == 1)
    names = {
        "generate": ("time/rollout",),
        "train": ("time/update",),
        "old log-probs": (),
        "sync": ("time/sync",),
        "grade": ("time/grade",),
    }
    steps = [
        {phase: sum(row.get(name, 0.0) for name in parts) for phase, parts in names.items()}
        | {"step": row["time/step"], "generated": row["batch/tokens_generated"], "trained": row["batch/tokens_trained"]}
        for row in rows
    ]
    peak = 0.0
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_reserved() / 2**30
    return {
        "rows": steps,
        "peak": peak,
        "start": {"import": imported - start, "first step": first["time/step"]},
        "metrics": rows[-1],
    }


# --- TRL's arm ------------------------------------------------------------------------------------------------------
def trl(args: argparse.Namespace) -> dict[str, Any]:
    for name, value in {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    start = time.perf_counter()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    imported = time.perf_counter()
    work, settings = WORKS[args.work_name], dict(ARMS[args.arm])
    tokens = args.tokens or work["tokens"]
    spent: dict[str, float] = collections.defaultdict(float)
    rows: list[dict[str, float]] = []
    now = {"peak": 0.0, "start": 0.0}

    def timed(owner: Any, method: str, phase: str, when: Callable[[], bool] = lambda: True) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def run(*a: Any, **k: Any) -> Any:
            if not when():
                return original(*a, **k)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            result = original(*a, **k)
            torch.cuda.synchronize()
            spent[phase] += time.perf_counter() - begin
            return result

        setattr(owner, method, run)

    timed(GRPOTrainer, "_generate_single_turn", "generate and sync")
    timed(VLLMGeneration, "sync_weights", "sync")
    no_grad = lambda: not torch.is_grad_enabled()  # noqa: E731
    timed(GRPOTrainer, "_get_per_token_logps_and_entropies", "old log-probs", no_grad)
    timed(GRPOTrainer, "_generate_and_score_completions", "rollout")

    class Timer(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            spent.clear()
            now["start"] = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            wall = time.perf_counter() - now["start"]
            row = dict(spent) | {"step": wall, "train": wall - spent["rollout"]}
            row["generate"] = spent["generate and sync"] - spent["sync"]
            row["generated"] = row["trained"] = float(PROMPTS * SAMPLES * tokens)
            rows.append(row)
            free, total = torch.cuda.mem_get_info()
            now["peak"] = max(now["peak"], (total - free) / 2**30)
            spent.clear()
            now["start"] = time.perf_counter()

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        if any(len(ids) != tokens for ids in completion_ids):
            raise SystemExit("TRL generated other lengths: the work is not equal")
        return [score(ids) for ids in completion_ids]

    dtype = settings.pop("dtype", None)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        num_generations=SAMPLES,
        gradient_accumulation_steps=PROMPTS * SAMPLES // settings["per_device_train_batch_size"],
        max_completion_length=tokens,
        max_steps=WARM + args.steps,
        learning_rate=LR,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4 if dtype else 0.3,
        vllm_max_model_length=PROMPT_TOKENS + tokens,
        generation_kwargs={"ignore_eos": True, "detokenize": False},
        **({"model_init_kwargs": {"dtype": dtype, "attn_implementation": "sdpa"}} if dtype else {}),
        **settings,
    )
    adapter = None
    if work["lora"]:
        from peft import LoraConfig

        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(WARM + args.steps + 1)}),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left", truncation_side="left"),
        peft_config=adapter,
        callbacks=[Timer()],
    )
    ready = time.perf_counter()
    trainer.train()
    return {
        "rows": rows[WARM:],
        "peak": now["peak"],
        "start": {"import": imported - start, "trainer and engine": ready - imported, "first step": rows[0]["step"]},
    }


# --- driver ---------------------------------------------------------------------------------------------------------
def run_arm(arm: str, work: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--arm", arm, "--work-name", work, "--arm-out", file.name]
        command += ["--model", args.model, "--steps", str(args.steps), "--set", *args.set]
        log = Path(args.out).with_suffix(f".{arm.replace(' ', '_')}.{work}.log")
        with log.open("w") as stream:
            try:
                code = subprocess.run(command, stdout=stream, stderr=stream, timeout=args.limit, check=False).returncode
            except subprocess.TimeoutExpired:
                code = -1
        text = Path(file.name).read_text()
        if not text:
            print(f"{arm}, {work}: failed with {code}; the end of {log}:\n{log.read_text()[-1500:]}", file=sys.stderr)
            return {"failed": code}
        result: dict[str, Any] = json.loads(text)
        print(arm, work, [round(row["step"], 2) for row in result["rows"]], result["start"], file=sys.stderr)
        return result


def floors_of(work: str, model: str) -> dict[str, float]:
    """Seconds that the GPU's own matrix products and memory need (docs/benchmarks.md)."""
    from lockstep.plan.floors import H200, Update, Work, step_floor
    from lockstep.plan.shapes import read_shape

    shape, lora = read_shape(Path(model)), WORKS[work]["lora"]
    # Adapters of rank r on an OxI matrix have r (O + I) parameters.
    adapters = sum(RANK * (linear.outputs + linear.inputs) for linear in shape.linears) * shape.layers
    lengths = Work.equal(PROMPTS, SAMPLES, PROMPT_TOKENS, WORKS[work]["tokens"])
    # The bound that every arm is measured by: each sample's prompt is trained with it, as TRL does.
    floor = step_floor(shape, lengths, Update(adapters if lora else shape.parameters, lora, share_prompts=False), H200)
    return {"step": floor.total, "generate": floor.generate, "train": floor.train}


def table(work: str, results: dict[str, dict[str, Any]], floors: dict[str, float]) -> list[str]:
    def median(result: dict[str, Any], key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in result["rows"])

    kind = f"LoRA rank {RANK}" if WORKS[work]["lora"] else "full training"
    lines = [
        f"{kind}, {PROMPTS} x {SAMPLES} x ({PROMPT_TOKENS} + {WORKS[work]['tokens']}) tokens; "
        f"floor {floors['step']:.2f} s (generate {floors['generate']:.2f}, train {floors['train']:.2f})",
        "",
        "| arm | step, s | generate | old log-probs | train | sync | trained tok/s | peak GiB | of the floor | Lockstep is |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    mine = results.get("Lockstep", {})
    for arm, result in results.items():
        if "rows" not in result:
            lines.append(f"| {arm} | failed |")
            continue
        step, rows = median(result, "step"), result["rows"]
        equal = mine.get("rows") and all(median(mine, k) == median(result, k) for k in ("generated", "trained"))
        ratio = f"{step / median(mine, 'step'):.2f}x as fast" if equal else ""
        spread = f"{min(r['step'] for r in rows):.2f}-{max(r['step'] for r in rows):.2f}"
        phases = " | ".join(f"{median(result, phase):.2f}" for phase in PHASES)
        lines.append(
            f"| {arm} | {step:.2f} ({spread}) | {phases} | {median(result, 'trained') / step:,.0f} | {result['peak']:.0f} "
            f"| {floors['step'] / step:.0%} | {ratio} |"
        )
    return lines


def versions() -> str:
    found = []
    for name in ("torch", "transformers", "peft", "trl", "vllm", "liger-kernel"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, help="run one arm in this process")
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--arm-out", default="/dev/stdout")
    parser.add_argument("--work", nargs="*", choices=WORKS, default=["full"])
    parser.add_argument("--work-name", choices=WORKS, default="full", help="of one arm")
    parser.add_argument("--model", default="", help="folder made by random_model.py; none makes one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=0, help="another length, to try things out")
    parser.add_argument("--cpu", action="store_true", help="a tiny version of our arm, to try things out")
    parser.add_argument("--set", nargs="*", default=[], help="settings of our arm. Example: update.recompute=full")
    parser.add_argument("--limit", type=float, default=280)
    parser.add_argument("--out", default="gpu_step.json")
    args = parser.parse_args()
    if args.arm:
        result = (lockstep if args.arm == "Lockstep" else trl)(args)
        Path(args.arm_out).write_text(json.dumps(result))
        return
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            from random_model import write_model

            write_model(Path(folder), "1.5b")
            args.model = folder
        floors = {work: floors_of(work, args.model) for work in args.work}
        results = {work: {arm: run_arm(arm, work, args) for arm in args.arms} for work in args.work}
    import torch

    lines = [f"{torch.cuda.get_device_name()}, {platform.machine()}, {versions()}"]
    for work in args.work:
        lines += ["", *table(work, results[work], floors[work])]
    Path(args.out).write_text(json.dumps(results, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
