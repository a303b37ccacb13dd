"""Does exactness change what is learned? SmolLM2-135M learns to find the largest of five numbers on one GPU, three seeds an arm.

    python benchmarks/gpu_exact_learning.py --jobs 3
    python benchmarks/gpu_exact_learning.py --cpu --seeds 0 --steps 2 --only plain TIS --set eval.items=8 --out /tmp/learning

The arms are the recipe with `numerics.exact`, without it, and without it but with truncated importance sampling (TIS). TRL with
vLLM makes one run of the same prompts, group sizes, learning rate and adapter, for the difference of its engine and its trainer.
Writes a table (gpu_exact_learning.md) and two plots into --out. Runs that have finished are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import trl_arms
from training_plot import CURVE, plot
from training_runs import ROOT, Job, Outcome, add_arguments, chosen, machine, overrides_of, percent, run_all

NUMBERS, DIGITS, PROMPTS, SAMPLES, RATE, STEPS = 5, 4, 32, 8, 2e-4, 80
SHARED = (
    str(ROOT / "recipes" / "quickstart.yaml"),
    f"steps={STEPS}",
    f"prompts_per_step={PROMPTS}",
    f"samples_per_prompt={SAMPLES}",
    f"task.data.settings={{count: 5000, numbers: {NUMBERS}, digits: {DIGITS}}}",
    "task.heldout_rows=400",
    "rollout.slots=256",
    f"optimizer.lr={RATE}",
    "eval.items=400",
    "eval.every=1000",
    "eval.modes=[{name: greedy}]",
    "save.every=1000",
    "health.ranges={}",
    "allow=[busy_gpu]",
)
ARMS = {
    "exact": ("numerics.exact=true",),
    "plain": ("numerics.exact=false",),
    "TIS": ("numerics.exact=false", "algorithm.correction={kind: tis}"),
}
MEANING = {
    "exact": "numerics.exact",
    "plain": "without it",
    "TIS": "without it, losses weighted by truncated importance ratios",
    "TRL": "TRL 1.16 with vLLM 0.24",
}
GAP, LARGEST = "mismatch/mean_abs_dlogp", "mismatch/max_abs_dlogp"


# --- TRL ------------------------------------------------------------------------------------------------------------
def trl(steps: int, out: Path) -> None:
    """Make TRL's run; write for each step its reward and the difference of its two log-probabilities."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from lockstep.config.load import load
    from lockstep.models import resolve
    from lockstep.user_code import load_object

    recipe = load(SHARED)
    shots = [
        {"role": role, "content": text}
        for example in recipe.chat.examples
        for role, text in (("user", example.user), ("assistant", example.assistant))
    ]
    draw: Any = load_object(f"{ROOT / 'recipes' / 'largest_number.py'}:rows")
    rows = draw(5000, NUMBERS, DIGITS)
    data = [{"prompt": [*shots, {"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows]

    def reward(completions: Any, answer: Sequence[str], **_: object) -> list[float]:
        replies = ["".join(c if c.isdigit() else " " for c in reply[0]["content"]).split() for reply in completions]
        return [float(bool(found) and found[-1] == right) for found, right in zip(replies, answer, strict=True)]

    model = str(resolve(recipe.model).path)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(out.parent / "trl"),
            num_generations=SAMPLES,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            max_completion_length=8,
            max_steps=steps,
            learning_rate=RATE,
            beta=0.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.2,
            vllm_max_model_length=512,
            model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=trl_adapter(),
    )
    trainer.train()
    out.write_text(json.dumps(trainer.state.log_history))


def trl_adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def read_trl(file: Path) -> Any:
    """Return TRL's run in the form of an Outcome that `plot` reads."""
    names = {
        "reward": CURVE,
        "sampling/sampling_logp_difference/mean": GAP,
        "sampling/sampling_logp_difference/max": LARGEST,
    }
    rows = [row for row in json.loads(file.read_text()) if "reward" in row]
    records = [
        SimpleNamespace(
            step=step, metrics={ours: float(row[theirs]) for theirs, ours in names.items() if theirs in row}
        )
        for step, row in enumerate(rows, 1)
    ]
    return SimpleNamespace(job=Job("TRL", 0, ()), records=records)


# --- table ----------------------------------------------------------------------------------------------------------
def page(outcomes: Sequence[Outcome], others: Sequence[Any], where: str) -> str:
    steps = max(record.step for record in outcomes[0].records)
    lines = [
        "# Learning with and without exactness",
        "",
        f"SmolLM2-135M in bf16, LoRA, {steps} steps of {PROMPTS} prompts x {SAMPLES} samples: the largest of {NUMBERS} numbers.",
        "",
        "![Difference of sampled and trained log-probabilities by step](gpu_exact_learning_gap.svg)",
        "",
        "![Mean training reward by step](gpu_exact_learning.svg)",
        "",
        "Means over the seeds; bars reach from the lowest seed to the highest; 0 is drawn at 1e-6.",
        "",
        "| arm | seed | base, % | trained, % | difference, points | reward, last 10 steps | mean difference of log-probabilities"
        ", nats | largest | step, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        found, job = outcome.comparison, outcome.job
        scores = f"{percent(found.base)} | {percent(found.trained)} | {100 * found.difference:+.1f}"
        lines.append(row(job.label, job.seed, scores, outcome, f"{mean_of(outcome, 'time/step', 1):.2f}"))
    lines += [row("TRL with vLLM", 0, "– | – | –", other, "–") for other in others]
    return "\n".join([*lines, "", f"Greedy accuracy on {outcomes[0].comparison.n} held-out questions. {where}."])


def row(label: str, seed: int, scores: str, outcome: Any, step: str) -> str:
    last = fmean([record.metrics[CURVE] for record in outcome.records if CURVE in record.metrics][-10:])
    largest = max(record.metrics.get(LARGEST, 0.0) for record in outcome.records)
    return f"| {label} | {seed} | {scores} | {last:.2f} | {mean_of(outcome, GAP):.3g} | {largest:.3g} | {step} |"


def mean_of(outcome: Any, name: str, first: int = 0) -> float:
    values = [record.metrics[name] for record in outcome.records[first:] if name in record.metrics]
    return fmean(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "gpu_exact_learning")
    parser.add_argument("--trl", type=Path, help="make TRL's run alone, into this file")
    parser.add_argument("--cpu", action="store_true", help="our arms on a CPU and no TRL, to try things out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of table and plots")
    args = parser.parse_args()
    if args.trl:
        trl(args.steps or STEPS, args.trl)
        return
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    file = args.runs_dir / "trl.json"
    if not args.cpu and not file.exists():
        words = [sys.executable, __file__, "--trl", str(file), *(["--steps", str(args.steps)] if args.steps else [])]
        subprocess.run(words, check=False, cwd=ROOT, env=trl_arms.ENVIRONMENT | os.environ)
    settings = (*overrides_of(args), f"device={'cpu' if args.cpu else 'cuda'}")
    jobs = [
        Job(
            arm,
            seed,
            (*SHARED, *ARMS[arm], *settings, f"seed={seed}", f"runs_dir={args.runs_dir}", f"name={arm}-{seed}"),
        )
        for arm in chosen(ARMS, args.only)
        for seed in args.seeds
    ]
    outcomes = run_all(jobs, args.jobs, args.threads)
    others = [read_trl(file)] if file.exists() else []
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_exact_learning.svg").write_text(plot([*outcomes, *others], MEANING) + "\n")
    title = "Difference of sampled and trained log-probabilities by step, nats"
    gaps = plot([*outcomes, *others], MEANING, GAP, title, logarithmic=True)
    (args.out / "gpu_exact_learning_gap.svg").write_text(gaps + "\n")
    text = page(outcomes, others, machine(args.threads, args.jobs))
    (args.out / "gpu_exact_learning.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
