"""Deliberately stale rollouts: four updates a step at a high rate, with and without what accounts for it.

    .venv/bin/python benchmarks/stale_rollouts.py --jobs 1 --threads 2
    .venv/bin/python benchmarks/stale_rollouts.py --only none tis --seeds 0 --steps 2 --set eval.items=8 --out /tmp/stale

recipes/algorithms/stale.yaml has a loss without a ratio, so that nothing accounts for the way that the weights go between the
updates of a step. The arms put back an importance weight π_θ/π_rollout, each with another way to bound it. Writes a table
(stale_rollouts.md) and a plot (stale_rollouts.svg) into --out. Runs that have finished are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from training_plot import CURVE, plot
from training_runs import ROOT, Job, Outcome, add_arguments, chosen, machine, overrides_of, percent, run_all

ARMS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "tis-token": ("algorithm.correction={kind: tis, level: token, cap: 2.0}",),
    "tis-sequence": ("algorithm.correction={kind: tis, level: sequence, cap: 2.0}",),
    "mis-token": ("algorithm.correction={kind: mis, level: token, low: 0.5, high: 2.0}",),
    "clip": ("algorithm.loss={kind: clip}",),
}
"""What each arm changes in stale.yaml."""
MEANING = {
    "none": "no weight: -A log π",
    "tis-token": "truncated: -min(w, 2) A log π",
    "tis-sequence": "the same, w of the whole reply",
    "mis-token": "masked: w where 0.5 <= w <= 2, else 0",
    "clip": "PPO's clip: -min(w A, clip(w, 0.8, 1.2) A)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "stale_rollouts")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "algorithms", help="folder of the table and the plot"
    )
    args = parser.parse_args()
    arms = chosen(ARMS, args.only)
    overrides = overrides_of(args)
    jobs = [job(arm, seed, args.runs_dir, args.threads, overrides) for arm in arms for seed in args.seeds]
    outcomes = run_all(jobs, args.jobs, args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "stale_rollouts.svg").write_text(plot(outcomes, MEANING) + "\n", encoding="utf-8")
    text = page(outcomes, machine(args.threads, args.jobs), overrides)
    (args.out / "stale_rollouts.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def job(arm: str, seed: int, runs_dir: Path, threads: int, overrides: Sequence[str]) -> Job:
    recipe = str(ROOT / "recipes" / "algorithms" / "stale.yaml")
    own = (f"name=stale-{arm}-seed{seed}", f"seed={seed}", f"runs_dir={runs_dir}", f"threads={threads}")
    return Job(arm, seed, (recipe, *ARMS[arm], *overrides, *own))


def page(outcomes: Sequence[Outcome], where: str, overrides: Sequence[str]) -> str:
    """The table and the plot, and the command that gave them."""
    changed = f" {' '.join(overrides)}" if overrides else ""
    steps = max(record.step for outcome in outcomes for record in outcome.records)
    labels = dict.fromkeys(outcome.job.label for outcome in outcomes)
    lines = [
        "# Stale rollouts",
        "",
        f"<!-- Written by benchmarks/stale_rollouts.py{changed}. -->",
        "",
        f"`recipes/algorithms/stale.yaml`: {steps} steps with four updates each at ten times the adapters' default rate, so "
        "that three of four updates work on samples of other weights. w = π_θ/π_rollout (`old_logprobs: rollout`).",
        "",
        *(f"- `{label}`: {MEANING[label]}" for label in labels),
        "",
        "![Mean training reward by step](stale_rollouts.svg)",
        "",
        "Mean training reward by step, mean over the seeds; bars reach from the lowest seed to the highest.",
        "",
        "| arm | seed | base, % | trained, % | difference, points | p | reward, last 5 steps | entropy, last 5 steps | "
        "largest ratio |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(row, outcomes),
        "",
        f"Greedy accuracy on {outcomes[0].comparison.n} held-out sums; p is McNemar's. {where}.",
        "",
        "To repeat: `python benchmarks/stale_rollouts.py`.",
    ]
    return "\n".join(lines)


def row(outcome: Outcome) -> str:
    found, job = outcome.comparison, outcome.job
    p = "< 0.0001" if found.p < 1e-4 else f"{found.p:.4f}"
    return (
        f"| {job.label} | {job.seed} | {percent(found.base)} | {percent(found.trained)} | {100 * found.difference:+.1f} | {p} | "
        f"{outcome.last(CURVE):.2f} | {outcome.last('entropy/mean'):.3f} | {outcome.largest('ratio/max'):.3g} |"
    )


if __name__ == "__main__":
    main()
