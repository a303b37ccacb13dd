"""SFT on a CPU: Lockstep against TRL's SFTTrainer on identical work, in alternating processes, with equal losses checked.

    .venv/bin/pip install trl==1.16.0
    .venv/bin/python benchmarks/cpu_sft.py --runs 3 --steps 4

Both arms: SmolLM2-135M-Instruct, the same rows of ids in the same order, loss on the replies alone, token mean, AdamW, clipped at
1, one update a step, one forward pass of all rows (Lockstep packed, TRL padded as it comes on a CPU). Works:

    spread   rows of 32 to 256 tokens, half of them prompt: full training in fp32
    equal    rows of 192 tokens, every one with loss: nothing to gain from packing or from leaving prompts out of the head
    lora     as spread, LoRA rank 16 on all linear layers, in bf16

The ratio is of wall seconds. Beside it stands that of CPU seconds, which other programs on the machine disturb less: with one
thread and nothing else running both are the same.

No ratio is printed unless the trained tokens are equal and the losses of all steps agree (1e-3 in fp32; in bf16, where adapters
begin with other numbers, the first loss within 1e-2). TRL's gradient checkpointing, on by default, is off: it is faster so. The
first step of each process warms up and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

LR, RANK, VOCABULARY = 1e-4, 16, 49152


@dataclass(frozen=True)
class Work:
    rows: int
    low: int
    high: int
    prompt: float
    """Share of a row."""
    lora: bool = False

    @property
    def dtype(self) -> str:
        return "bf16" if self.lora else "fp32"


WORKS = {
    "spread": Work(6, 32, 256, 0.5),
    "equal": Work(4, 192, 192, 0.0),
    "lora": Work(6, 32, 256, 0.5, lora=True),
}


def rows_of(work: Work, steps: int) -> list[tuple[list[int], int]]:
    """(ids, length of the prompt): lengths and ids by chance, the same in both arms."""
    draw = random.Random(0)
    rows = []
    for _ in range(work.rows * steps):
        length = draw.randint(work.low, work.high)
        # Ids above the special ones; few different ones, so that there is something to learn.
        rows.append(([100 + draw.randrange(300) for _ in range(length)], max(1, int(length * work.prompt))))
    return rows


# --- our arm --------------------------------------------------------------------------------------------------------
def ours(name: str, steps: int, model: str) -> dict[str, Any]:
    from lockstep.algorithms.build import build_objective
    from lockstep.build.build import build_policy
    from lockstep.config.load import load
    from lockstep.learner.learner import TorchLearner
    from lockstep.loops.sft_data import weighted
    from lockstep.types import Batch, TrainSequence

    work = WORKS[name]
    recipe = load(
        [
            f"model={{path: {model}, dtype: {work.dtype}}}",
            f"adapter={{kind: lora, rank: {RANK}, targets: all-linear}}" if work.lora else "adapter={kind: none}",
            "loop=sft",
            f"sft={{data: none.jsonl, sequences_per_step: {work.rows}}}",
            f"optimizer={{lr: {LR}}}",
            f"steps={steps}",
            "update.tokens_per_microbatch=16384",
            "device=cpu",
        ]
    )
    learner = TorchLearner(build_policy(recipe).model, recipe)
    objective = build_objective(recipe)
    rows = [
        TrainSequence(tuple(ids[:at]), tuple(ids[at:]), (True,) * (len(ids) - at), (), (), 0.0, group)
        for group, (ids, at) in enumerate(rows_of(work, steps))
    ]
    found = []
    for step in range(steps):
        start, cpu = time.perf_counter(), time.process_time()
        chosen = rows[step * work.rows : (step + 1) * work.rows]
        weights = objective.weights([len(one.ids) for one in chosen], [one.group for one in chosen])
        metrics = learner.update(Batch(weighted(chosen, weights), supervised=True), objective.loss)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        found.append(
            {"step": seconds, "cpu": cpu, "trained": metrics["batch/tokens_trained"], "loss": metrics["sft/loss"]}
        )
    return {"rows": found, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


# --- TRL's arm ------------------------------------------------------------------------------------------------------
def trl(name: str, steps: int, model: str) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from lockstep.config.schema import Model
    from lockstep.models import load_tokenizer, resolve

    work, resolved = WORKS[name], resolve(Model(path=model))
    given = rows_of(work, steps)
    data = Dataset.from_list(
        [{"input_ids": ids, "completion_mask": [0] * at + [1] * (len(ids) - at)} for ids, at in given]
    )
    found: list[dict[str, float]] = []
    now: dict[str, float] = {}

    class Timer(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            now["start"], now["cpu start"] = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: object, **__: object) -> None:
            now["step"] = time.perf_counter() - now["start"]
            now["cpu"] = time.process_time() - now["cpu start"]

        def on_log(self, _args: object, _state: object, _control: object, logs: dict[str, float], **__: object) -> None:
            if "loss" in logs:
                chosen = given[len(found) * work.rows : (len(found) + 1) * work.rows]
                trained = sum(len(ids) - at for ids, at in chosen)
                found.append({"step": now["step"], "cpu": now["cpu"], "trained": trained, "loss": float(logs["loss"])})

    class InOrder(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(data)

    config = SFTConfig(
        output_dir="/tmp/trl_cpu_sft",
        use_cpu=True,
        bf16=False,
        fp16=False,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_steps=steps,
        per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        max_length=None,
        completion_only_loss=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        model_init_kwargs={"dtype": "bfloat16" if work.lora else "float32"},
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        disable_tqdm=True,
        seed=0,
    )
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = InOrder(
        model=str(resolved.path),
        args=config,
        train_dataset=data,
        processing_class=load_tokenizer(resolved),
        peft_config=lora if work.lora else None,
        callbacks=[Timer()],
    )
    trainer.train()
    return {"rows": found, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


# --- driver ---------------------------------------------------------------------------------------------------------
def run_arm(arm: str, work: str, steps: int, threads: int, model: str) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--arm", arm, "--works", work, "--steps", str(steps), "--model", model]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_equal(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of the losses. Ends the program if the work was not the same."""
    pairs = list(zip(ours["rows"], theirs["rows"], strict=True))
    for mine, other in pairs:
        if mine["trained"] != other["trained"]:
            raise SystemExit(f"unequal work, no ratio: {mine['trained']:.0f} tokens against {other['trained']:.0f}")
    compared, limit = (pairs[:1], 1e-2) if WORKS[name].lora else (pairs, 1e-3)
    difference = max(abs(mine["loss"] - other["loss"]) for mine, other in compared)
    if difference > limit:
        shown = ", ".join(f"{mine['loss']:.4f}/{other['loss']:.4f}" for mine, other in pairs)
        raise SystemExit(f"unequal losses, no ratio: {shown}")
    return difference


def line(name: str, runs: dict[str, list[dict[str, Any]]], difference: float) -> str:
    """A row of the table: medians over the steps of all processes, the first of each left out."""
    rows = {arm: [row for run in results for row in run["rows"][1:]] for arm, results in runs.items()}
    speed = {arm: statistics.median(row["trained"] / row["step"] for row in of) for arm, of in rows.items()}
    thrift = {arm: statistics.median(row["trained"] / row["cpu"] for row in of) for arm, of in rows.items()}
    memory = {arm: max(run["rss"] for run in results) for arm, results in runs.items()}
    spread = {arm: f"{min(r['step'] for r in of):.2f}-{max(r['step'] for r in of):.2f}" for arm, of in rows.items()}
    return (
        f"| {name} | {speed['ours']:.0f} | {speed['trl']:.0f} | {speed['ours'] / speed['trl']:.2f} | "
        f"{thrift['ours'] / thrift['trl']:.2f} | {spread['ours']} | "
        f"{spread['trl']} | {memory['ours']:.2f} | {memory['trl']:.2f} | {difference:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=["ours", "trl"], help="run one arm in this process and print its numbers")
    parser.add_argument("--works", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="per process, the first one left out")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="built-in name or folder of SmolLM2-135M")
    parser.add_argument("--out", type=Path, help="also write the table there")
    args = parser.parse_args()
    if args.arm:
        print(json.dumps({"ours": ours, "trl": trl}[args.arm](args.works[0], args.steps, args.model)))
        return
    lines = [
        f"{platform.machine()}, {args.threads} threads; torch {version('torch')}, transformers {version('transformers')}, "
        f"peft {version('peft')}, trl {version('trl')}, Python {platform.python_version()}",
        f"{args.runs} processes an arm with {args.steps - 1} measured steps each; medians",
        "",
        "| work | Lockstep, trained tokens/s | TRL | ratio | in CPU seconds | step, s | step of TRL, s | peak GiB | TRL's | "
        "losses differ by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in args.works:
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        difference = 0.0
        for index in range(args.runs):
            for arm in ("ours", "trl") if index % 2 == 0 else ("trl", "ours"):
                runs[arm].append(run_arm(arm, name, args.steps, args.threads, args.model))
            difference = max(difference, check_equal(name, runs["ours"][-1], runs["trl"][-1]))
        lines.append(line(name, runs, difference))
        print(lines[-1], file=sys.stderr)
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
