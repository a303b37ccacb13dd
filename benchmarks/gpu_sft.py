"""SFT on one GPU: Lockstep against TRL's SFTTrainer on identical work: tokens a second and model FLOP utilisation.

    python benchmarks/gpu_sft.py --out sft.json                    # 1.5B, 32 rows of 2048 tokens a step, full training
    python benchmarks/gpu_sft.py --cpu --steps 2 --arms Lockstep   # a tiny version of our arm, to try things out

The Qwen2.5-1.5B shape with random weights; every row has exactly 2048 tokens, a prompt of 8 and a reply of 2040 with loss, so
that no arm pads and none gains by packing. bf16 computation, AdamW at 1e-5 clipped at 1. Lockstep trains bf16 weights with fp32
masters, as `lockstep train` does, and runs its own loop; so does TRL, once as it comes (fp32 weights under autocast, gradient
checkpointing) and twice with what its manual advises for speed; "tuned bf16" also rounds weights and optimizer state to bf16.
Each arm is a process of its own; its first steps are left out. Ratios are printed only between arms that trained the same number
of tokens and began with the same loss.

MFU = (3 · 2 · (body · T + head · R) + 3.5 · 2 · L · d_a · Σ S²) / seconds / 989e12, the H200's dense bf16 peak: T tokens, R with
loss, S of a row, body and head the parameters of the matrices; recomputation counts nothing (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROWS, TOKENS, PROMPT, LR = 32, 2048, 8, 1e-5
WARM = 2
PEAK = 989e12
SAME_LOSS = 0.02
ARMS: dict[str, dict[str, Any]] = {
    "Lockstep": {},
    "TRL stock": {"gradient_checkpointing": True, "per_device_train_batch_size": 8, "bf16": True},
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


def texts(count: int, tokens: int) -> list[str]:
    """One character is one token (benchmarks/random_model.py)."""
    draw = random.Random(1)
    letters = string.ascii_lowercase + " "
    return ["".join(draw.choices(letters, k=tokens)) for _ in range(count)]


# --- our arm --------------------------------------------------------------------------------------------------------
def lockstep(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from lockstep.config.load import load
    from lockstep.loops.run import start_run
    from lockstep.track.writer import read_metrics

    steps, rows, tokens = WARM + args.steps + 1, args.rows, args.tokens
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        given = [{"prompt": text[:PROMPT], "answer": text[PROMPT:]} for text in texts(rows * steps, tokens)]
        data.write_text("".join(json.dumps(row) + "\n" for row in given))
        recipe = load(
            [
                "name=bench",
                "loop=sft",
                f"runs_dir={folder}",
                f"model={{path: {args.model}, dtype: {'fp32' if args.cpu else 'bf16'}}}",
                f"sft={{data: {data}, validation_rows: 0, sequences_per_step: {rows}, max_tokens: {tokens}}}",
                f"steps={steps}",
                f"optimizer={{lr: {LR}}}",
                "rollout={max_tokens: 16, slots: 1}",
                "eval.enabled=false",
                "save.every=1000",
                *args.set,
            ]
        )
        run = start_run(recipe)
        found = [row.metrics for row in read_metrics(run) if 0 < row.step < steps]  # the last step also saves
        notes = [line for line in run.log_path.read_text().splitlines() if "micro-batch" in line]
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    timed = [
        {"step": m["time/step"], "update": m["time/update"], "trained": m["batch/tokens_trained"]} for m in found[WARM:]
    ]
    return {"rows": timed, "peak": peak, "losses": [m["sft/loss"] for m in found], "notes": notes}


# --- TRL's arm ------------------------------------------------------------------------------------------------------
def trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    settings, steps = dict(ARMS[args.arm]), WARM + args.steps
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = [tokenizer(text)["input_ids"] for text in texts(args.rows * steps, args.tokens)]
    if any(len(row) != args.tokens for row in ids):
        raise SystemExit("the tokenizer gives other lengths: the work is not equal")
    mask = [0] * PROMPT + [1] * (args.tokens - PROMPT)
    rows: list[dict[str, float]] = []
    losses: list[float] = []
    now = {"start": 0.0}

    class Timer(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            if not rows:
                torch.cuda.synchronize()
                now["start"] = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            end = time.perf_counter()
            seconds = end - now["start"]
            rows.append({"step": seconds, "update": seconds, "trained": float(args.rows * (args.tokens - PROMPT))})
            now["start"] = end  # from step to step: the data loader's part is in it, as it is in ours

        def on_log(self, _args: object, _state: object, _control: object, logs: dict[str, float], **__: object) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    dtype = settings.pop("dtype", None)
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        gradient_accumulation_steps=args.rows // settings["per_device_train_batch_size"],
        max_length=None,
        completion_only_loss=True,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        **({"model_init_kwargs": {"dtype": dtype, "attn_implementation": "sdpa"}} if dtype else {}),
        **settings,
    )
    data = Dataset.from_list([{"input_ids": row, "completion_mask": mask} for row in ids])
    trainer = SFTTrainer(
        model=args.model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Timer()]
    )
    trainer.train()
    return {"rows": rows[WARM:], "peak": torch.cuda.max_memory_reserved() / 2**30, "losses": losses, "notes": []}


# --- driver ---------------------------------------------------------------------------------------------------------
def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--arm", arm, "--arm-out", file.name, "--model", args.model]
        command += ["--steps", str(args.steps), "--rows", str(args.rows), "--tokens", str(args.tokens)]
        command += ["--cpu"] * args.cpu + ["--set", *args.set]
        log = Path(args.out).with_suffix(f".{arm.replace(' ', '_')}.log")
        with log.open("w") as stream:
            try:
                code = subprocess.run(command, stdout=stream, stderr=stream, timeout=args.limit, check=False).returncode
            except subprocess.TimeoutExpired:
                code = -1
        text = Path(file.name).read_text()
        if not text:
            print(f"{arm}: failed with {code}; the end of {log}:\n{log.read_text()[-1500:]}", file=sys.stderr)
            return {"failed": code}
        result: dict[str, Any] = json.loads(text)
        print(
            arm, [round(row["step"], 3) for row in result["rows"]], result["losses"], result["notes"], file=sys.stderr
        )
        return result


def step_flops(model: str, rows: int, tokens: int) -> float:
    """Of one training step, by the formula at the top."""
    from lockstep.plan.floors import H200, Update, Work, train_seconds
    from lockstep.plan.shapes import read_shape

    shape = read_shape(Path(model))
    work = Work.equal(rows, 1, PROMPT, tokens - PROMPT)
    return train_seconds(shape, work, Update(shape.parameters), H200) * H200.flops


def table(results: dict[str, dict[str, Any]], flops: float, args: argparse.Namespace) -> list[str]:
    lines = [
        f"full training, {args.rows} rows x {args.tokens} tokens a step, {flops / 1e12:.0f} TFLOP",
        "",
        "| arm | step, s | tokens/s | MFU (of 989 TFLOP/s) | of 790 | peak GiB | first loss | Lockstep is |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    mine = results.get("Lockstep", {})
    for arm, result in results.items():
        if "rows" not in result:
            lines.append(f"| {arm} | failed |")
            continue
        rows = result["rows"]
        step = statistics.median(row["step"] for row in rows)
        spread = f"{min(row['step'] for row in rows):.2f}-{max(row['step'] for row in rows):.2f}"
        ratio = ""
        if mine.get("rows"):
            same = mine["rows"][0]["trained"] == rows[0]["trained"]
            close = abs(mine["losses"][0] - result["losses"][0]) <= SAME_LOSS * mine["losses"][0]
            other = statistics.median(row["step"] for row in mine["rows"])
            ratio = f"{step / other:.2f}x as fast" if same and close else "not comparable"
        lines.append(
            f"| {arm} | {step:.3f} ({spread}) | {args.rows * args.tokens / step:,.0f} | {flops / step / PEAK:.1%} | "
            f"{flops / step / 790e12:.1%} | {result['peak']:.0f} | {result['losses'][0]:.3f} | {ratio} |"
        )
    return lines


def versions() -> str:
    found = []
    for name in ("torch", "transformers", "trl", "liger-kernel"):
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
    parser.add_argument("--model", default="", help="folder made by random_model.py; none makes one")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--cpu", action="store_true", help="a tiny version of our arm, to try things out")
    parser.add_argument("--set", nargs="*", default=[], help="settings of our arm. Example: update.recompute=full")
    parser.add_argument("--limit", type=float, default=280)
    parser.add_argument("--out", default="gpu_sft.json")
    args = parser.parse_args()
    if args.arm:
        result = (lockstep if args.arm == "Lockstep" else trl)(args)
        Path(args.arm_out).write_text(json.dumps(result))
        return
    if args.cpu:
        args.rows, args.tokens = 4, 128
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            from random_model import write_model

            write_model(Path(folder), "tiny" if args.cpu else "1.5b", **({"device": "cpu"} if args.cpu else {}))
            args.model = folder
        flops = step_flops(args.model, args.rows, args.tokens)
        results = {arm: run_arm(arm, args) for arm in args.arms}
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [f"{device}, {platform.machine()}, {versions()}", "", *table(results, flops, args)]
    Path(args.out).write_text(json.dumps(results, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
