"""The quickstart with three seeds, and a control that learns nothing because its learning rate is 0.

    .venv/bin/python benchmarks/quickstart.py
    .venv/bin/python benchmarks/quickstart.py --seeds 0 --steps 2 --set eval.items=8 --out /tmp/table.md

Runs recipes/quickstart.yaml one after the other and writes a table (accuracy on held-out questions before and after, McNemar's p,
the metrics that left their healthy range, seconds) and a plot of the training reward. Runs that have finished are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training_plot import plot
from training_runs import ROOT, Job, Outcome, add_arguments, chosen, machine, overrides_of, percent, run_all

from lockstep.config.load import load
from lockstep.evaluate.compare import compare
from lockstep.evaluate.records import read_score, score_path
from lockstep.report.gather import find_outside

RECIPE = ROOT / "recipes" / "quickstart.yaml"
ARMS: dict[str, tuple[tuple[str, ...], str]] = {
    "quickstart": ((), "as it is; mean, lowest and highest of the seeds"),
    "control": (("optimizer.lr=0",), "learning rate 0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "quickstart_benchmark")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "quickstart_results.md", help="the table")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "quickstart.svg")
    args = parser.parse_args()
    overrides = overrides_of(args)
    jobs = []
    for name in chosen(ARMS, args.only):
        for seed in args.seeds[: None if name == "quickstart" else 1]:
            own = (f"name={name}-seed{seed}", f"seed={seed}", f"runs_dir={args.runs_dir}", "device=cpu")
            threads = f"threads={args.threads}"
            jobs.append(Job(name, seed, (str(RECIPE), *overrides, *ARMS[name][0], *own, threads)))
    outcomes = run_all(jobs, args.jobs, args.threads)
    text = page(outcomes, machine(args.threads, args.jobs), overrides)
    print(text)
    args.out.write_text(text + "\n", encoding="utf-8")
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    args.plot.write_text(
        plot(outcomes, {name: meaning for name, (_, meaning) in ARMS.items()}) + "\n", encoding="utf-8"
    )


def page(outcomes: Sequence[Outcome], where: str, overrides: Sequence[str]) -> str:
    """The tables with a heading, and the command that gave them."""
    recipe = load(outcomes[0].job.args)
    changed = f" {' '.join(overrides)}" if overrides else ""
    lines = [
        "# The quickstart's results",
        "",
        f"<!-- Written by benchmarks/quickstart.py{changed}. -->",
        "",
        f"`recipes/quickstart.yaml`, {recipe.steps} steps of {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} "
        "samples. "
        f"Scores on {outcomes[0].comparison.n} held-out questions, with 95 % intervals; p is McNemar's. {where}.",
        "",
        "| run | mode | base, % | trained, % | difference, points | fell / rose | p |",
        "|---|---|---|---|---|---|---|",
        *(row(outcome, mode.name) for outcome in outcomes for mode in recipe.eval.modes),
        "",
        "| run | reward, first and last 5 steps | training, s | whole run, s | metrics outside their healthy range (steps) |",
        "|---|---|---|---|---|",
        *map(course, outcomes),
        "",
        "To repeat: `python benchmarks/quickstart.py`.",
    ]
    return "\n".join(lines)


def row(outcome: Outcome, mode: str) -> str:
    recipe, folder = load(outcome.job.args), outcome.job.folder
    found = compare(*(read_score(score_path(folder, step, mode)) for step in (0, recipe.steps)))
    p = "< 0.0001" if found.p < 1e-4 else f"{found.p:.4f}"
    interval = f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return (
        f"| {outcome.job.label}, seed {outcome.job.seed} | {mode} | {percent(found.base)} | {percent(found.trained)} | "
        f"{interval} | {found.b} / {found.c} | {p} |"
    )


def course(outcome: Outcome) -> str:
    rewards = [record.metrics["reward/mean"] for record in outcome.records if "reward/mean" in record.metrics][:5]
    run, first = f"{outcome.job.label}, seed {outcome.job.seed}", sum(rewards) / len(rewards)
    outside = ", ".join(f"`{one.name}` ({len(one.steps)})" for one in find_outside(outcome.records)) or "none"
    return (
        f"| {run} | {first:.2f}, {outcome.last('reward/mean'):.2f} | {outcome.training_seconds:.0f} | "
        f"{outcome.wall_seconds:.0f} | {outside} |"
    )


if __name__ == "__main__":
    main()
