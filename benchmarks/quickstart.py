"""The quickstart with three seeds, and a control that learns nothing because its learning rate is 0.

    .venv/bin/python benchmarks/quickstart.py
    .venv/bin/python benchmarks/quickstart.py --seeds 0 --steps 2 --set eval.items=8 --out /tmp/page.md

Runs recipes/quickstart.yaml one after the other and writes into docs/quickstart.md, between its two comments: a table (accuracy
on held-out questions before and after, McNemar's p, the metrics that left their healthy range, seconds), some replies, and a plot
of the training reward. Runs that have finished are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training_plot import plot
from training_runs import MODE, ROOT, Job, Outcome, add_arguments, chosen, machine, overrides_of, percent, run_all

from lockstep.config.load import load
from lockstep.evaluate.compare import compare
from lockstep.evaluate.records import read_score, score_path
from lockstep.report.gather import find_outside
from lockstep.tasks.build import build_task
from lockstep.types import ItemResult

RECIPE = ROOT / "recipes" / "quickstart.yaml"
BEGIN, END = "<!-- Written by benchmarks/quickstart.py -->", "<!-- End -->"
ARMS: dict[str, tuple[tuple[str, ...], str]] = {
    "quickstart": ((), "as it is; mean, lowest and highest of the seeds"),
    "control": (("optimizer.lr=0",), "learning rate 0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "quickstart_benchmark")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "quickstart.md", help="the page that gets the results"
    )
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
    text = results(outcomes, machine(args.threads, args.jobs), overrides)
    print(text)
    head, _, rest = args.out.read_text(encoding="utf-8").partition(BEGIN)
    args.out.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    args.plot.write_text(
        plot(outcomes, {name: meaning for name, (_, meaning) in ARMS.items()}) + "\n", encoding="utf-8"
    )


def results(outcomes: Sequence[Outcome], where: str, overrides: Sequence[str]) -> str:
    """The tables, the picture and some replies."""
    recipe = load(outcomes[0].job.args)
    changed = f" with {' '.join(overrides)}" if overrides else ""
    lines = [
        f"{recipe.steps} steps of {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} samples{changed}; scores on "
        f"{outcomes[0].comparison.n} held-out questions with 95 % intervals of the difference; p is McNemar's.",
        f"{where}.",
        "",
        "| run | mode | base, % | trained, % | difference, points | fell / rose | p |",
        "|---|---|---|---|---|---|---|",
        *(row(outcome, mode.name) for outcome in outcomes for mode in recipe.eval.modes),
        "",
        "| run | reward, first and last 5 steps | training, s | whole run, s | metrics outside their healthy range (steps) |",
        "|---|---|---|---|---|",
        *map(course, outcomes),
        "",
        "![Mean training reward by step](images/quickstart.svg)",
        "",
        f"Greedy replies of {outcomes[0].job.label}, seed {outcomes[0].job.seed}:",
        "",
        "| held-out question | base | trained |",
        "|---|---|---|",
        *replies(outcomes[0]),
    ]
    return "\n".join(lines)


def replies(outcome: Outcome, count: int = 6) -> list[str]:
    """The first held-out questions, with what the model replied before and after."""
    recipe, folder = load(outcome.job.args), outcome.job.folder
    asked = build_task(recipe.task, recipe.seed).heldout(recipe.eval.role, count)
    before, after = (
        {item.id: item for item in read_score(score_path(folder, step, MODE)).results} for step in (0, recipe.steps)
    )
    return [
        f"| {prompt.messages[-1]['content']} | {shown(before[prompt.id])} | {shown(after[prompt.id])} |"
        for prompt in asked
    ]


def shown(item: ItemResult) -> str:
    return f"`{item.text}`, {'right' if item.correct else 'wrong'}"


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
