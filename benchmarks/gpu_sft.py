"""SFT on one GPU: Lockstep against TRL's SFTTrainer on identical work: tokens a second and model FLOP utilisation.

    python benchmarks/gpu_sft.py --write           # 1.5B, 32 rows of 2048 tokens a step, full training; some two minutes
    python benchmarks/gpu_sft.py --cpu --steps 1   # tiny versions of all arms on a CPU, to try the program out: no figures

The Qwen2.5-1.5B shape with random weights; every row has exactly 2048 tokens, a prompt of 8 and a reply of 2040 with loss, so
that no arm pads and none gains by packing. bf16 computation, AdamW at 1e-5 clipped at 1. Lockstep trains bf16 weights with fp32
masters, as `lockstep train` does, and runs its own loop; so does TRL, once as it comes (fp32 weights under autocast, gradient
checkpointing) and twice with what its manual advises for speed; "tuned bf16" also rounds weights and optimizer state to bf16.
Each arm is a process of its own; all import at once, then each has the GPU alone. First steps are left out, and nothing is
saved. Ratios are printed only between arms that trained the same number of tokens and began with the same loss. `--write` also
writes the table to benchmarks/results/gpu_sft.txt.

MFU = (3 · 2 · (body · T + head · R) + 3.5 · 2 · L · d_a · Σ S²) / seconds / 989e12, the H200's dense bf16 peak: T tokens, R with
loss, S of a row, body and head the parameters of the matrices; recomputation counts nothing (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from devices import device_name, peak
from results_file import RESULTS, header, write_section
from trl_arms import ARMS, PACKAGES, Process, save_nothing, step_timer, trainer_settings, wait_turn, write_model

ROWS, TOKENS, PROMPT, LR = 32, 2048, 8, 1e-5
WARM = 2
PEAK = 989e12
SAME_LOSS = 0.02
RESULT = RESULTS / "gpu_sft.txt"


def texts(count: int, tokens: int) -> list[str]:
    """One character is one token (benchmarks/random_model.py)."""
    draw = random.Random(1)
    letters = string.ascii_lowercase + " "
    return ["".join(draw.choices(letters, k=tokens)) for _ in range(count)]


# --- our arm --------------------------------------------------------------------------------------------------------
def lockstep(args: argparse.Namespace) -> dict[str, Any]:
    from lockstep.config.load import load
    from lockstep.loops.start import start_run
    from lockstep.track.writer import read_metrics

    wait_turn(args)
    save_nothing()
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
        found = [row.metrics for row in read_metrics(run) if 0 < row.step < steps]  # the last step also proves the sync
        notes = [line for line in run.log_path.read_text().splitlines() if "micro-batch" in line]
    timed = [{"step": m["time/step"], "trained": m["batch/tokens_trained"]} for m in found[WARM:]]
    return {"rows": timed, "losses": [m["sft/loss"] for m in found], "notes": notes}


# --- TRL's arm ------------------------------------------------------------------------------------------------------
def trl(args: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    wait_turn(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = [tokenizer(text)["input_ids"] for text in texts(args.rows * (WARM + args.steps), args.tokens)]
    if any(len(row) != args.tokens for row in ids):
        raise SystemExit("the tokenizer gives other lengths: the work is not equal")
    mask = [0] * PROMPT + [1] * (args.tokens - PROMPT)
    rows: list[dict[str, float]] = []

    def step(seconds: float) -> None:
        rows.append({"step": seconds, "trained": float(args.rows * (args.tokens - PROMPT))})

    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=args.model,
            args=trl_config(args, folder),
            train_dataset=Dataset.from_list([{"input_ids": row, "completion_mask": mask} for row in ids]),
            processing_class=tokenizer,
            callbacks=[step_timer(step)],
        )
        trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return {"rows": rows[WARM:], "losses": losses, "notes": []}


def trl_config(args: argparse.Namespace, folder: str) -> Any:
    """What the arm says, and what makes the work equal."""
    from trl import SFTConfig

    settings = trainer_settings(args.arm, cpu=args.cpu)
    return SFTConfig(
        output_dir=folder,
        gradient_accumulation_steps=args.rows // settings["per_device_train_batch_size"],
        max_length=None,
        completion_only_loss=True,
        max_steps=WARM + args.steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        **settings,
    )


# --- driver ---------------------------------------------------------------------------------------------------------
def start_arm(arm: str, args: argparse.Namespace, folder: Path) -> Process:
    log = Path(args.out).with_suffix(f".{arm.replace(' ', '_')}.log")
    given = ["--arm", arm, "--model", args.model, "--steps", str(args.steps), "--rows", str(args.rows)]
    given += ["--tokens", str(args.tokens), *["--cpu"] * args.cpu, "--set", *args.set]
    return Process.start(arm, __file__, given, log, folder)


def step_flops(model: str, rows: int, tokens: int) -> float:
    """Of one training step, by the formula at the top."""
    from lockstep.plan.floors import H200, Update, Work, train_seconds
    from lockstep.plan.model_shape import read_shape

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, help="run one arm in this process")
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--arm-out", default="/dev/stdout")
    parser.add_argument("--gate", default="", help="of one arm: the file that says that it waits for its turn")
    parser.add_argument("--model", default="", help="folder made by random_model.py; none makes one")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--cpu", action="store_true", help="tiny versions of the arms on a CPU, to try the program out")
    parser.add_argument("--set", nargs="*", default=[], help="settings of our arm. Example: update.recompute=full")
    parser.add_argument("--limit", type=float, default=280, help="seconds that an arm may have the GPU")
    parser.add_argument("--out", default="gpu_sft.json")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the table to a file, {RESULT.name}")
    args = parser.parse_args()
    if args.cpu and args.write == RESULT:
        raise SystemExit("a CPU's figures are none: give --write another file")
    if args.arm:
        result = (lockstep if args.arm == "Lockstep" else trl)(args)
        Path(args.arm_out).write_text(json.dumps(result | {"peak": peak(), "device": device_name()}))
        return
    if args.cpu:
        args.rows, args.tokens = 4, 128
    with tempfile.TemporaryDirectory() as folder:
        make = not args.model
        args.model = args.model or f"{folder}/model"
        arms = [start_arm(arm, args, Path(folder)) for arm in args.arms]
        if make:
            write_model(Path(args.model), "tiny" if args.cpu else "1.5b", cpu=args.cpu)
        flops = step_flops(args.model, args.rows, args.tokens)
        for arm in arms:
            arm.ready()
        results = {arm.name: arm.run(args.limit) for arm in arms}
    where = next((result["device"] for result in results.values() if "device" in result), "no device")
    lines = [*header(__file__, where, PACKAGES), "", *table(results, flops, args)]
    Path(args.out).write_text(json.dumps(results, indent=1))
    print("\n".join(lines))
    if args.write:
        write_section(args.write, "full training", lines)


if __name__ == "__main__":
    main()
