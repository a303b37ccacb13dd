"""One training step on one GPU: Lockstep against TRL with colocated vLLM on identical work, by phases, with the physical floor.

    python benchmarks/gpu_step.py --write                    # full training, 256 + 512 tokens; table into results/gpu_step.txt
    python benchmarks/gpu_step.py --work long lora --write   # 256 + 1024 tokens; LoRA rank 32 on all linear layers
    python benchmarks/gpu_step.py --work lognormal --write   # replies of log-normal lengths, mean 480, at most 1024
    python benchmarks/gpu_step.py --shape 7b --arms Lockstep --set optimizer.offload=cpu --limit 500
    python benchmarks/gpu_step.py --cpu --work full lora     # tiny versions on a CPU, to try the program out: no figures

The Qwen2.5-1.5B shape with random weights, 64 prompts of 256 tokens x 8 samples, end tokens ignored, temperature 1, one update
a step, AdamW at 1e-6 clipped at 1, no KL. Full training keeps fp32 weights under bf16 computation in every arm but "TRL tuned
bf16", which rounds weights and optimizer state to bf16 (with adapters it would compute in fp32: it is left out there). Lockstep
runs its own training loop as `lockstep train` does, proof of sync included; TRL runs its trainer, once as it comes and with what
its manual advises for speed. "Lockstep full" beside LoRA is our own full step of the same call. Each arm is a process of its own;
all import first, then each has the GPU alone. First steps are left out, and nothing is saved.

Of log-normal lengths every arm has the same list (that of gpu_rollout.py), the i-th request so many tokens: ours by the request,
TRL's by giving vLLM sampling parameters for each. Tokens generated and trained are counted in every arm (TRL's by its completion
mask), and a ratio is printed only between arms whose counts are equal. Peak memory is the process's whole share of the GPU.

On a CPU, TRL generates with transformers (vLLM needs a GPU), to the longest reply, and what is over a sample's length is cut.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import trl_arms
from devices import device_name, peak, synchronise
from random_model import SHAPES
from results_file import RESULTS, header, write_section
from step_work import FULL, PROMPT_TOKENS, RANK, WORKS, Size, floors_of, prompt_texts, score, title
from trl_arms import PACKAGES, Process, timed, wait_turn

LR = 1e-6
WARM = 1
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
"""Processes of TRL's arm, which share the samples (gpu_two.py)."""
RESULT = RESULTS / "gpu_step.txt"
TASK = Path(__file__).with_name("step_work.py")
ARMS = ("Lockstep", FULL, *[arm for arm in trl_arms.ARMS if arm.startswith("TRL")])
PHASES = ("generate", "old log-probs", "train", "sync")


# --- our arm --------------------------------------------------------------------------------------------------------
def lockstep(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    from lockstep.config.load import load
    from lockstep.loops.start import start_run
    from lockstep.rollout.native import NativeEngine
    from lockstep.rollout.paged.engine import PagedEngine
    from lockstep.track.writer import read_metrics

    imported = time.perf_counter()
    wait_turn(args)
    trl_arms.save_nothing()
    work, size = WORKS[args.work_name], Size.of(args.work_name, args.tokens, cpu=args.cpu)
    if work.lognormal:
        from lockstep.cluster.group_engine import GroupEngine

        for engine in (NativeEngine if args.cpu else PagedEngine, GroupEngine):
            trl_arms.limit_requests(engine, size.lengths)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = start_run(load(recipe_words(args, folder)))
        rows = [row.metrics for row in read_metrics(run) if row.step > WARM]
        first = next(row.metrics for row in read_metrics(run) if row.step == 1)
    steps = [
        {
            "generate": row["time/rollout"],
            "old log-probs": 0.0,
            "train": row["time/update"],
            "sync": row["sync/seconds"],  # of which workers may spend a part while the driver does something else
            "grade": row["time/grade"],
            "step": row["time/step"],
            "generated": row["batch/tokens_generated"],
            "trained": row["batch/tokens_trained"],
        }
        for row in rows
    ]
    spent = sum(row["time/step"] for row in (first, *rows))
    start_up = {"import": imported - start, "loading": time.perf_counter() - begin - spent}
    return {"rows": steps, "start": start_up | {"first step": first["time/step"]}, "metrics": rows[-1]}


def recipe_words(args: argparse.Namespace, folder: str) -> list[str]:
    work, size = WORKS[args.work_name], Size.of(args.work_name, args.tokens, cpu=args.cpu)
    lora, steps = work.lora and args.arm != FULL, WARM + args.steps
    return [
        "name=bench",
        f"runs_dir={folder}",
        f"model={{path: {args.model}, dtype: {'fp32' if args.cpu else 'bf16'}}}",
        f"adapter={{kind: lora, rank: {RANK}, alpha: {2 * RANK}, merged: {work.merged}}}"
        if lora
        else "adapter={kind: none}",
        f"task={{kind: python, path: {TASK}:BenchmarkTask, settings: {{prompts: {steps * size.prompts}}}}}",
        f"steps={steps}",
        f"prompts_per_step={size.prompts}",
        f"samples_per_prompt={size.samples}",
        f"rollout={{max_tokens: {size.longest}, ignore_eos: true, slots: {size.replies}}}",
        f"optimizer={{lr: {LR}}}",
        "update.drop_zero_advantage=false",
        "eval.enabled=false",
        "save.every=1000",
        "track.rollouts_every=1000",
        "allow=[disk]",
        *(["device=cpu"] if args.cpu else []),
        *args.set,
    ]


# --- TRL's arm ------------------------------------------------------------------------------------------------------
def trl(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    imported = time.perf_counter()
    wait_turn(args)
    begin = time.perf_counter()
    work, size = WORKS[args.work_name], Size.of(args.work_name, args.tokens, cpu=args.cpu)
    spent: dict[str, float] = {}
    rows: list[dict[str, float]] = []
    if args.cpu:
        cut_replies(GRPOTrainer, size)
    timed(GRPOTrainer, "_generate_single_turn", spent, "generate and sync")
    timed(VLLMGeneration, "sync_weights", spent, "sync")
    logprobs = "_get_per_token_logps_and_entropies"
    timed(GRPOTrainer, logprobs, spent, "old log-probs", when=lambda: not torch.is_grad_enabled())

    def count(batch: dict[str, Any]) -> None:
        spent["trained"] = float(batch["completion_mask"].sum()) * WORLD

    timed(GRPOTrainer, "_generate_and_score_completions", spent, "rollout", take=count)

    def step(seconds: float) -> None:
        train = {"step": seconds, "train": seconds - spent["rollout"]}
        rows.append(spent | train | {"generate": spent["generate and sync"] - spent.get("sync", 0.0)})
        spent.clear()

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        if [len(ids) for ids in completion_ids] != list(size.lengths)[: size.replies // WORLD]:
            raise SystemExit("TRL generated other lengths: the work is not equal")
        spent["generated"] = float(sum(map(len, completion_ids))) * WORLD
        return [score(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=args.model,
            reward_funcs=reward,
            args=trl_config(args, folder),
            train_dataset=Dataset.from_dict({"prompt": prompt_texts((WARM + args.steps + 1) * size.prompts)}),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left", truncation_side="left"),
            peft_config=trl_adapter() if work.lora else None,
            callbacks=[trl_arms.step_timer(step)],
        )
        if work.lognormal and not args.cpu:
            trl_arms.limit_generate(trainer.vllm_generation.llm, size.lengths)
        ready = time.perf_counter()
        trainer.train()
    start_up = {"import": imported - start, "trainer and engine": ready - begin, "first step": rows[0]["step"]}
    return {"rows": rows[WARM:], "start": start_up}


def trl_config(args: argparse.Namespace, folder: str) -> Any:
    """What the arm says, and what makes the work equal."""
    from trl import GRPOConfig

    size = Size.of(args.work_name, args.tokens, cpu=args.cpu)
    settings = trl_arms.trainer_settings(args.arm, cpu=args.cpu)
    engine: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4 if "model_init_kwargs" in settings else 0.3,
        "vllm_max_model_length": PROMPT_TOKENS + size.longest,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
    }
    if args.cpu:
        engine = {"generation_kwargs": {"min_new_tokens": size.longest}}
    return GRPOConfig(
        output_dir=folder,
        num_generations=size.samples,
        gradient_accumulation_steps=size.replies // settings["per_device_train_batch_size"] // WORLD,
        max_completion_length=size.longest,
        max_steps=WARM + args.steps,
        learning_rate=LR,
        beta=0.0,
        **engine,
        **settings,
    )


def trl_adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def cut_replies(trainer: Any, size: Size) -> None:
    """transformers' generation knows one length for all: what is over a sample's own is cut, before its log-probabilities."""
    original = trainer._generate_single_turn

    def generate(self: Any, *given: Any, **keywords: Any) -> Any:
        completion_ids, logprobs = original(self, *given, **keywords)
        return [ids[:tokens] for ids, tokens in zip(completion_ids, size.lengths, strict=True)], logprobs

    trainer._generate_single_turn = generate


# --- driver ---------------------------------------------------------------------------------------------------------
def run_work(work: str, args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Every arm in a process of its own. Ours imports alone, so that its time is told; TRL's arms side by side."""
    common = ["--work-name", work, "--model", args.model, "--steps", str(args.steps), "--tokens", str(args.tokens)]
    common += ["--cpu"] * args.cpu
    arms: list[Process] = []
    with ExitStack() as stack:
        for arm in args.arms or [arm for arm in ARMS if arm != WORKS[work].left_out]:
            log = Path(args.out).with_suffix(f".{arm.replace(' ', '_')}.{work}.log")
            process = Process.start(arm, __file__, ["--arm", arm, *common, "--set", *args.set], log, folder)
            stack.callback(process.process.kill)
            arms.append(process)
            if not arm.startswith("TRL"):
                process.ready()
        for process in arms:
            process.ready()
        return {process.name: process.run(args.limit) for process in arms}


def median(result: dict[str, Any], key: str) -> float:
    return float(statistics.median(row.get(key, 0.0) for row in result["rows"]))


def table(work: str, results: dict[str, dict[str, Any]], floors: dict[str, float], size: Size) -> list[str]:
    lines = [
        f"{title(work, size)}; floor {floors['step']:.2f} s (generate {floors['generate']:.2f}, train {floors['train']:.2f})",
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
        ratio = f"{step / median(mine, 'step'):.2f}x as fast" if equal else "other work" if mine.get("rows") else ""
        spread = f"{min(r['step'] for r in rows):.2f}-{max(r['step'] for r in rows):.2f}"
        phases = " | ".join(f"{median(result, phase):.2f}" for phase in PHASES)
        # Adapters take less work than what "Lockstep full" is measured by here.
        share = "" if arm == FULL else f"{floors['step'] / step:.0%}"
        lines.append(
            f"| {arm} | {step:.2f} ({spread}) | {phases} | {median(result, 'trained') / step:,.0f} | {result['peak']:.1f} "
            f"| {share} | {ratio} |"
        )
    for arm, result in results.items():
        if "memory/predicted_gib" in result.get("metrics", {}):
            planned, error = (result["metrics"][f"memory/{name}"] for name in ("predicted_gib", "plan_error"))
            lines += ["", f"{arm}: torch's peak {planned * (1 + error):.1f} GiB, planned {planned:.1f}"]
    if "optimizer" in floors:
        lines += ["", f"of the floor, the optimizer step takes {floors['optimizer']:.2f} s"]
    lines += ["", f"Seconds from start to first step, and {WARM} + N steps; medians of N:"]
    for arm, result in results.items():
        if "rows" in result:
            start = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result["start"].items())
            tokens = f"{median(result, 'generated'):,.0f} generated, {median(result, 'trained'):,.0f} trained"
            lines.append(f"{arm}: {start}; N = {len(result['rows'])}; tokens a step: {tokens}")
    return lines


def offloaded(settings: list[str]) -> str:
    """Return the precision of moments in main memory; empty without optimizer.offload."""
    if "optimizer.offload=cpu" not in settings:
        return ""
    return "8bit" if "optimizer.states=8bit" in settings else "fp32"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--arm", choices=ARMS, help="run one arm in this process")
    made.add_argument("--arms", nargs="*", choices=ARMS, help="none given: all that the work has")
    made.add_argument("--arm-out", default="/dev/stdout")
    made.add_argument("--gate", default="", help="of one arm: the file that says that it waits for its turn")
    made.add_argument("--work", nargs="*", choices=WORKS, default=["full"])
    made.add_argument("--work-name", choices=WORKS, default="full", help="of one arm")
    made.add_argument("--model", default="", help="folder made by random_model.py; none makes one")
    made.add_argument("--shape", choices=SHAPES, default="1.5b", help="of the model that is made")
    made.add_argument("--steps", type=int, default=3)
    made.add_argument("--tokens", type=int, default=0, help="another length, to try things out")
    made.add_argument("--cpu", action="store_true", help="tiny versions of the arms on a CPU, to try things out")
    made.add_argument("--set", nargs="*", default=[], help="settings of our arm. Example: update.recompute=full")
    made.add_argument("--limit", type=float, default=280, help="seconds that an arm may have the GPU")
    made.add_argument("--out", default="gpu_step.json")
    made.add_argument("--write", nargs="?", type=Path, const=RESULT, help=f"write the tables to a file, {RESULT.name}")
    return made


def main() -> None:
    args = parser().parse_args()
    if args.cpu and args.write == RESULT:
        raise SystemExit("a CPU's figures are none: give --write another file")
    if args.arm:
        result = (trl if args.arm.startswith("TRL") else lockstep)(args)
        synchronise()
        if os.environ.get("RANK", "0") != "0":
            return
        Path(args.arm_out).write_text(json.dumps(result | {"peak": peak(), "device": device_name()}))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # arms end with the program, whatever ends it
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            args.model = f"{folder}/model"
            trl_arms.write_model(Path(args.model), "tiny" if args.cpu else args.shape, cpu=args.cpu)
        for work in args.work:
            results[work] = run_work(work, args, Path(folder))
            found = results[work].values()
            where = next((result["device"] for result in found if "device" in result), "no device")
            lines = [*header(__file__, where, PACKAGES), ""]
            size = Size.of(work, args.tokens, cpu=args.cpu)
            lines += table(work, results[work], floors_of(work, args.model, size, offload=offloaded(args.set)), size)
            print("\n".join([*lines, ""]), flush=True)
            Path(args.out).write_text(json.dumps(results, indent=1))
            if args.write:
                write_section(args.write, work, lines)


if __name__ == "__main__":
    main()
