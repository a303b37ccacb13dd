"""GRPO on a CPU: Lockstep against TRL on identical work, in alternating processes, with the machine's own floor.

    .venv/bin/pip install trl==1.16.0
    .venv/bin/python benchmarks/cpu_grpo.py --runs 3 --steps 4

Both arms: SmolLM2-135M-Instruct in bf16, LoRA rank 16 on all linear layers, the same 8 prompts a step x 8 samples, exactly 48
tokens each, temperature 1, one update a step, one micro-batch of 64 sequences, AdamW, the same reward. No ratio is printed unless
the tokens generated and trained agree within 0.5 %. The first step of each process warms up and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, TOKENS, RANK, ALPHA, LR = 8, 8, 48, 16, 32, 3e-4
SUFFIX = "\nPut your final answer in \\boxed{}."
AGREE = 0.005


def reward(text: str) -> float:
    """Any function of the text that differs within each group: the work must not depend on what was learnt."""
    return sum(map(ord, text)) % 10 / 10


def questions(steps: int) -> list[str]:
    import reasoning_gym

    data = reasoning_gym.create_dataset(
        "chain_sum", size=2000, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    unique = list(dict.fromkeys(data[i]["question"].strip() for i in range(2000)))
    return [unique[i % len(unique)] for i in range(PROMPTS * steps)]


# --- our arm --------------------------------------------------------------------------------------------------------
class Fixed:
    """The questions in their order; the reward is of the text."""

    name, notes = "fixed", ()

    def __init__(self, steps: int) -> None:
        self._asked = questions(steps)

    def batch(self, step: int, size: int) -> list[Any]:
        from lockstep.types import Prompt

        rows = range(step * size, step * size + size)
        return [Prompt(f"q{i}", ({"role": "user", "content": self._asked[i]},), "") for i in rows]

    def heldout(self, role: str, size: int) -> list[Any]:
        return []

    def grade(self, prompt: Any, reply: str) -> Any:
        from lockstep.types import Grade

        return Grade(reward(reply))


def ours(steps: int, model: str) -> dict[str, Any]:
    import lockstep
    from lockstep.track.rollouts import read_rollouts
    from lockstep.track.rundir import RunDirectory
    from lockstep.track.writer import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"runs_dir={folder}",
            f"model={{path: {model}, dtype: bf16}}",
            f"adapter={{kind: lora, rank: {RANK}, alpha: {ALPHA}}}",
            f"prompts_per_step={PROMPTS}",
            f"samples_per_prompt={SAMPLES}",
            f"rollout={{max_tokens: {TOKENS}, ignore_eos: true, slots: {PROMPTS * SAMPLES}}}",
            f"optimizer.lr={LR}",
            f"steps={steps}",
            "algorithm.aggregation=token-mean",
            "update={drop_zero_advantage: false, tokens_per_microbatch: 16384}",
            json.dumps(SUFFIX).join(["chat={suffix: ", "}"]),
            f"task={{kind: python, path: {Path(__file__).resolve()}:Fixed, settings: {{steps: {steps}}}}}",
            "eval.enabled=false",
            "save.every=1000",
            "device=cpu",
        ]
        run = RunDirectory.open(Path(lockstep.train(*words)))
        prompt = len(read_rollouts(run, 1)[0].prompt_ids)
        found = [row.metrics for row in read_metrics(run)]
    rows = [
        {
            "step": row["time/step"],
            "generate": row["time/rollout"],
            "train": row["time/update"],
            "sync": row["sync/seconds"],
            "generated": row["batch/tokens_generated"],
            "trained": row["batch/tokens_trained"],
            "prompt": prompt,
            "gradient": row["grad/norm"],
        }
        for row in found
    ]
    return {"rows": rows, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


# --- TRL's arm ------------------------------------------------------------------------------------------------------
def trl(steps: int, model: str) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from lockstep.config.schema import Model
    from lockstep.models import load_tokenizer, resolve

    resolved = resolve(Model(path=model))
    tokenizer = load_tokenizer(resolved)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": q + SUFFIX}]} for q in questions(steps)])
    rows: list[dict[str, float]] = []
    now: dict[str, float] = {}

    def score(completions: list[list[dict[str, str]]], completion_ids: list[list[int]], **_: object) -> list[float]:
        now["generated"] = sum(map(len, completion_ids))
        return [reward(c[0]["content"]) for c in completions]

    class Timer(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            now.update(start=time.perf_counter(), generate=0.0)

        def on_step_end(self, *_: object, **__: object) -> None:
            now["step"] = time.perf_counter() - now["start"]

        def on_log(self, _args: object, _state: object, _control: object, logs: dict[str, float], **__: object) -> None:
            if "reward" in logs:
                rest = now["step"] - now["generate"]
                mask = now["generated"] * (1 - float(logs.get("completions/clipped_ratio", 0) > 1))
                row = {key: now[key] for key in ("step", "generate", "generated")}
                rows.append(row | {"train": rest, "trained": mask, "gradient": float(logs["grad_norm"])})

    batch = PROMPTS * SAMPLES
    config = GRPOConfig(
        output_dir="/tmp/trl_cpu_grpo",
        use_cpu=True,
        bf16=False,
        fp16=False,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "bfloat16"},
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        seed=0,
    )
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=str(resolved.path),
        reward_funcs=score,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Timer()],
    )
    generate = trainer._generate

    def timed(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        result = generate(*args, **kwargs)
        now["generate"] += time.perf_counter() - start
        return result

    trainer._generate = timed
    trainer.train()
    return {"rows": rows, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


# --- floor ----------------------------------------------------------------------------------------------------------
def floor(prompt: int) -> dict[str, float]:
    """Seconds that this machine's own matrix products and memory need for one step: measured bf16 GEMM and copy rates.

    Body and head count multiply-adds of the model's matrices. Prompts once per group; LoRA training costs two forward
    passes (forward, and the gradient of the activations), the head a third for its recomputation.
    """
    import torch

    hidden, layers, inner, kv, vocab = 576, 30, 1536, 192, 49152
    body, head = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner), hidden * vocab

    def rate(rows: int) -> float:
        x, w = torch.randn(rows, hidden).bfloat16(), torch.randn(inner, hidden).bfloat16()
        best = 0.0
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(8):
                torch.nn.functional.linear(x, w)
            best = max(best, 8 * 2 * rows * hidden * inner / (time.perf_counter() - start))
        return best

    source = torch.zeros(64 * 2**20, dtype=torch.float32)
    target = torch.empty_like(source)
    copies = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        copies.append(2 * source.nbytes / (time.perf_counter() - start))
    bandwidth, many, few = max(copies), rate(4096), rate(PROMPTS * SAMPLES)
    sequences = PROMPTS * SAMPLES
    decode = TOKENS * max(2 * (body + head) * sequences / few, 2 * (body + head) / bandwidth)
    prefill = 2 * body * PROMPTS * prompt / many
    tokens, trained = PROMPTS * prompt + sequences * TOKENS, sequences * TOKENS
    train = (2 * 2 * body * tokens + 3 * 2 * head * trained) / many
    return {"generate": prefill + decode, "train": train, "gemm": many / 1e9, "copy": bandwidth / 1e9}


# --- driver ---------------------------------------------------------------------------------------------------------
def run_arm(arm: str, steps: int, threads: int, model: str) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--arm", arm, "--steps", str(steps), "--model", model]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=["ours", "trl"], help="run one arm in this process and print its numbers")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="per process, the first one left out")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="built-in name or folder of SmolLM2-135M")
    parser.add_argument("--out", type=Path, help="also write the table there")
    args = parser.parse_args()
    if args.arm:
        print(json.dumps({"ours": ours, "trl": trl}[args.arm](args.steps, args.model)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for index in range(args.runs):
        for arm in ("ours", "trl") if index % 2 == 0 else ("trl", "ours"):
            runs[arm].append(run_arm(arm, args.steps, args.threads, args.model))
            rows = runs[arm][-1]["rows"][1:]
            print(f"run {index + 1} {arm}: {statistics.median(r['step'] for r in rows):.2f} s a step", file=sys.stderr)
    text = table(runs, args.threads)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def table(runs: dict[str, list[dict[str, Any]]], threads: int) -> str:
    rows = {arm: [row for run in results for row in run["rows"][1:]] for arm, results in runs.items()}

    def median(arm: str, key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in rows[arm])

    for key in ("generated", "trained"):
        one, other = median("ours", key), median("trl", key)
        if abs(one - other) > AGREE * other:
            raise SystemExit(f"unequal work, no ratio: {one:.0f} tokens {key} against {other:.0f}")
    import torch

    torch.set_num_threads(threads)
    best = floor(int(median("ours", "prompt")))
    names = {"step": "whole step", "generate": "generation", "train": "training", "sync": "sync and proof"}
    floors = {**best, "step": best["generate"] + best["train"]}
    lines = [
        f"{PROMPTS} prompts x {SAMPLES} samples x {TOKENS} tokens, LoRA r{RANK}, bf16, {threads} threads, "
        f"{len(rows['ours'])} steps in {len(runs['ours'])} processes an arm; medians, seconds",
        f"{platform.machine()}, {cpu_name()}; torch {version('torch')}, transformers {version('transformers')}, "
        f"peft {version('peft')}, trl {version('trl')}, Python {platform.python_version()}",
        f"tokens a step: generated {median('ours', 'generated'):.0f} and {median('trl', 'generated'):.0f}, "
        f"trained {median('ours', 'trained'):.0f} and {median('trl', 'trained'):.0f}",
        f"floor: bf16 products {best['gemm']:.0f} GFLOP/s, copy {best['copy']:.1f} GB/s, measured here",
        "",
        "| | Lockstep | TRL | TRL / Lockstep | floor | share of the floor |",
        "|---|---|---|---|---|---|",
    ]
    for key, name in names.items():
        mine, peer = median("ours", key), median("trl", key)
        ratio = f"{peer / mine:.2f}" if mine and peer else ""
        bound = f"{floors[key]:.2f} | {floors[key] / mine:.0%}" if key in floors else " | "
        lines.append(f"| {name} | {mine:.2f} | {peer:.2f} | {ratio} | {bound} |")
    memory = {arm: max(run["rss"] for run in results) for arm, results in runs.items()}
    lines.append(
        f"| peak memory, GiB | {memory['ours']:.2f} | {memory['trl']:.2f} | {memory['trl'] / memory['ours']:.2f} | | |"
    )
    spread = {arm: (min(r["step"] for r in rows[arm]), max(r["step"] for r in rows[arm])) for arm in rows}
    lines += [
        "",
        "step, fastest and slowest: " + ", ".join(f"{a} {low:.2f}-{high:.2f}" for a, (low, high) in spread.items()),
    ]
    return "\n".join(lines)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
