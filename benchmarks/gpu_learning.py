"""The same training run with both engines on one GPU, three seeds each: SmolLM2-135M learns sums of three numbers.

    python benchmarks/gpu_learning.py --jobs 3
    python benchmarks/gpu_learning.py --only native --seeds 0 --steps 5 --set eval.items=8 --out /tmp/learning

Runs recipes/gpu_sums.yaml, whose engine is proven and probed at every step, and writes a table (gpu_learning.md) and a plot
(gpu_learning.svg) into --out. Runs that have finished are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from training_plot import CURVE, plot
from training_runs import ROOT, Job, Outcome, add_arguments, chosen, machine, overrides_of, percent, run_all

ENGINES: Mapping[str, tuple[str, ...]] = {
    "native": ("rollout.engine=native",),
    "vllm": ("rollout.engine=vllm", "rollout.vllm={max_model_len: 512, kv_cache_gib: 4}"),
}
"""What each arm changes in gpu_sums.yaml."""
MEANING = {
    "native": "the native engine, on the learner's own weights",
    "vllm": "vLLM in the trainer's process, base + adapter merged and copied at every version",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "gpu_learning")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of table and plot")
    args = parser.parse_args()
    overrides = overrides_of(args)
    jobs = [job(engine, seed, args.runs_dir, overrides) for engine in chosen(ENGINES, args.only) for seed in args.seeds]
    outcomes = run_all(jobs, args.jobs, args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_learning.svg").write_text(plot(outcomes, MEANING) + "\n", encoding="utf-8")
    text = page(outcomes, machine(args.threads, args.jobs))
    (args.out / "gpu_learning.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def job(engine: str, seed: int, runs_dir: Path, overrides: Sequence[str]) -> Job:
    recipe = str(ROOT / "recipes" / "gpu_sums.yaml")
    own = (f"name=gpu-sums-{engine}-seed{seed}", f"seed={seed}", f"runs_dir={runs_dir}")
    return Job(engine, seed, (recipe, *ENGINES[engine], *overrides, *own))


def page(outcomes: Sequence[Outcome], where: str) -> str:
    lines = [
        "# One learning run with both engines",
        "",
        f"`recipes/gpu_sums.yaml`, {max(r.step for r in outcomes[0].records)} steps, SmolLM2-135M in bf16, LoRA rank 16 with "
        "fp32 masters.",
        "",
        "![Mean training reward by step](gpu_learning.svg)",
        "",
        "Mean training reward by step, mean over the seeds; bars reach from the lowest seed to the highest.",
        "",
        "| engine | seed | base, % | trained, % | difference, points | p | reward, last 10 steps | steps with a proof | "
        "largest probe gap, nats | mean gap | step, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *map(row, outcomes),
        "",
        f"Greedy accuracy on {outcomes[0].comparison.n} held-out sums; p is McNemar's. {where}.",
        "",
        "To repeat: `python benchmarks/gpu_learning.py`.",
    ]
    return "\n".join(lines)


def row(outcome: Outcome) -> str:
    found, job = outcome.comparison, outcome.job
    p = "< 0.0001" if found.p < 1e-4 else f"{found.p:.4f}"
    gaps = [record.metrics["sync/probe_mean"] for record in outcome.records if "sync/probe_mean" in record.metrics]
    proven = sum("sync/tensors" in record.metrics for record in outcome.records)
    return (
        f"| {job.label} | {job.seed} | {percent(found.base)} | {percent(found.trained)} | {100 * found.difference:+.1f} | {p} | "
        f"{outcome.last(CURVE, 10):.2f} | {proven} | {max(gaps):.4f} | {fmean(gaps):.4f} | "
        f"{fmean(record.metrics['time/step'] for record in outcome.records[1:]):.2f} |"
    )


if __name__ == "__main__":
    main()
