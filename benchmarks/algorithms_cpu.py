"""Every algorithm on the same work: SmolLM2-135M learns sums on a CPU, three seeds each, scored before and after.

    .venv/bin/python benchmarks/algorithms_cpu.py --jobs 1 --threads 2
    .venv/bin/python benchmarks/algorithms_cpu.py --only grpo rloo --seeds 0 --steps 2 --set eval.items=8 --out /tmp/table.md

Runs recipes/algorithms/*.yaml, which differ in nothing but the algorithm and what comes with it, and writes a table: accuracy on
200 held-out sums, greedy, before and after, McNemar's p for the difference, and the time. Runs that have finished are not made
again. A recipe with four updates a step and ten times the rate is for stale rollouts and is left out here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training_runs import ROOT, Job, Outcome, add_arguments, chosen, machine, overrides_of, percent, run_all

from lockstep.config.load import load

RECIPES = ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "algorithms_cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "algorithms" / "results.md", help="the table")
    args = parser.parse_args()
    names = chosen(RECIPES, args.only)
    overrides = overrides_of(args)
    jobs = [job(name, seed, args.runs_dir, args.threads, overrides) for name in names for seed in args.seeds]
    outcomes = run_all(jobs, args.jobs, args.threads)
    text = page(outcomes, machine(args.threads, args.jobs), overrides)
    print(text)
    args.out.write_text(text + "\n", encoding="utf-8")


def job(name: str, seed: int, runs_dir: Path, threads: int, overrides: Sequence[str]) -> Job:
    recipe = str(ROOT / "recipes" / "algorithms" / f"{name}.yaml")
    own = (f"name={name}-seed{seed}", f"seed={seed}", f"runs_dir={runs_dir}", f"threads={threads}", "device=cpu")
    return Job(name, seed, (recipe, *overrides, *own))


def page(outcomes: Sequence[Outcome], where: str, overrides: Sequence[str]) -> str:
    """The table with a heading, and the command that gave it."""
    recipe = load(outcomes[0].job.args)
    items = outcomes[0].comparison.n
    changed = f" {' '.join(overrides)}" if overrides else ""
    lines = [
        "# All algorithms on one task",
        "",
        f"<!-- Written by benchmarks/algorithms_cpu.py{changed}. -->",
        "",
        f"{recipe.model.path}, adapter {recipe.adapter.kind}, sums of two signed one-digit numbers: `recipes/algorithms/`, "
        f"{recipe.steps} steps of {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} samples, scored greedily on "
        f"{items} held-out sums before and after. p is McNemar's, two-sided.",
        "",
        f"{where}.",
        "",
        "| algorithm | seed | base, % | trained, % | difference, points | fell / rose | p | reward, last 5 steps | "
        "training, s | whole run, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(row, outcomes),
        "",
        *summary(outcomes),
        "",
        "To repeat: `python benchmarks/algorithms_cpu.py`.",
    ]
    return "\n".join(lines)


def row(outcome: Outcome) -> str:
    found, job = outcome.comparison, outcome.job
    p = "< 0.0001" if found.p < 1e-4 else f"{found.p:.4f}"
    interval = f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return (
        f"| [{job.label}]({job.label}.md) | {job.seed} | {percent(found.base)} | {percent(found.trained)} | {interval} | "
        f"{found.b} / {found.c} | {p} | {outcome.last('reward/mean'):.2f} | {outcome.training_seconds:.0f} | "
        f"{outcome.wall_seconds:.0f} |"
    )


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Which algorithms rose with p < 0.01 in all their seeds, and which did not."""
    rose: dict[str, bool] = {}
    for outcome in outcomes:
        found = outcome.comparison
        rose[outcome.job.label] = rose.get(outcome.job.label, True) and found.difference > 0 and found.p < 0.01
    shown, others = ([name for name, all_rose in rose.items() if all_rose is want] for want in (True, False))
    lines = [f"Rose with p < 0.01 in every seed: {', '.join(shown) or 'none'}."]
    return [*lines, f"Did not: {', '.join(others)}."] if others else lines


if __name__ == "__main__":
    main()
