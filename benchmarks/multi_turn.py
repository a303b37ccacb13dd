"""Episodes of several turns on a CPU: SmolLM2-135M learns to use a calculator, and to guess a number, scored before and after.

    .venv/bin/python benchmarks/multi_turn.py --jobs 1 --threads 2
    .venv/bin/python benchmarks/multi_turn.py --only calculator --seeds 0 --steps 2 --set eval.items=8 --out /tmp/table.md

Runs recipes/envs/*.yaml and writes a table: the share of held-out episodes that are solved, sampled at temperature 1, before and
after, with the test of the difference. It also reads every stored trajectory of the runs and compares the tokens that are trained
with those that the engine returned. Runs that have finished are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training_runs import ROOT, Job, add_arguments, chosen, machine, overrides_of, percent, run_all

from lockstep.config.load import load
from lockstep.evaluation.compare import Comparison, compare
from lockstep.evaluation.records import read_score, score_path
from lockstep.track.rollouts import read_rollouts, rollout_steps
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics

RECIPES = ("calculator", "guess_number")
MODE = "sampled"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of all trajectories of a run."""

    trajectories: int
    sampled: int
    """What the engine returned, by the steps' own count."""
    trained: int
    """Marked as trained in the stored trajectories."""
    observed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "multi_turn")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "environments_results.md", help="the table")
    args = parser.parse_args()
    overrides = overrides_of(args)
    jobs = [
        job(name, s, args.runs_dir, args.threads, overrides) for name in chosen(RECIPES, args.only) for s in args.seeds
    ]
    run_all(jobs, args.jobs, args.threads)
    text = page(jobs, machine(args.threads, args.jobs), overrides)
    print(text)
    args.out.write_text(text + "\n", encoding="utf-8")


def job(name: str, seed: int, runs_dir: Path, threads: int, overrides: Sequence[str]) -> Job:
    recipe = str(ROOT / "recipes" / "envs" / f"{name}.yaml")
    own = (f"name={name}-seed{seed}", f"seed={seed}", f"runs_dir={runs_dir}", f"threads={threads}", "device=cpu")
    return Job(name, seed, (recipe, *overrides, *own))


def page(jobs: Sequence[Job], where: str, overrides: Sequence[str]) -> str:
    changed = f" {' '.join(overrides)}" if overrides else ""
    lines = [
        "# Episodes of several turns",
        "",
        f"<!-- Written by benchmarks/multi_turn.py{changed}. -->",
        "",
        "`recipes/envs/`, held-out episodes solved at temperature 1, before and after training.",
        "",
        f"{where}.",
        "",
        "| recipe | seed | items | base, % | trained, % | difference, points | p | turns, first / last steps | trajectories | "
        "tokens sampled | tokens trained | tokens observed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(row, jobs),
        "",
        f"To repeat: `python benchmarks/multi_turn.py --only {' '.join(dict.fromkeys(job.label for job in jobs))}`.",
    ]
    return "\n".join(lines)


def row(job: Job) -> str:
    found, tokens = comparison(job), tokens_of(RunDirectory.open(job.folder))
    if tokens.sampled != tokens.trained:
        raise SystemExit(f"{job.folder}: {tokens.sampled} tokens were sampled, {tokens.trained} are trained")
    turns = [
        record.metrics["env/turns"]
        for record in read_metrics(RunDirectory.open(job.folder))
        if "env/turns" in record.metrics
    ]
    p = "< 0.0001" if found.p < 1e-4 else f"{found.p:.4f}"
    return (
        f"| {job.label} | {job.seed} | {found.n} | {percent(found.base)} | {percent(found.trained)} | "
        f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}] | {p} | "
        f"{sum(turns[:3]) / len(turns[:3]):.1f} / {sum(turns[-3:]) / len(turns[-3:]):.1f} | "
        f"{tokens.trajectories} | {tokens.sampled} | {tokens.trained} | {tokens.observed} |"
    )


def comparison(job: Job) -> Comparison:
    recipe = load(job.args)
    base, trained = (read_score(score_path(job.folder, step, MODE)) for step in (0, recipe.steps))
    return compare(base, trained)


def tokens_of(run: RunDirectory) -> Tokens:
    """Of the run's stored trajectories, against what its steps counted."""
    rows = [row for step in rollout_steps(run) for row in read_rollouts(run, step)]
    counted = sum(record.metrics.get("env/tokens_sampled", 0.0) for record in read_metrics(run))
    trained = sum(sum(row.trained) for row in rows)
    return Tokens(len(rows), int(counted), trained, sum(len(row.ids) for row in rows) - trained)


if __name__ == "__main__":
    main()
