"""SmolLM2-135M learns to make legal moves in connect four and tic-tac-toe, with the legal moves listed in the prompt and without.

    python benchmarks/open_spiel_learning.py --jobs 3 --threads 2
    python benchmarks/open_spiel_learning.py --only listed --seeds 0 --steps 2 --set eval.items=8 --out /tmp/open_spiel

Runs recipes/envs/open_spiel_legal.yaml and writes a table (open_spiel_results.md) and a plot (open_spiel_results.svg) into --out:
the share of legal moves on held-out states before and after, by case. Runs that have finished are not made again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from training_plot import CURVE, plot
from training_runs import ROOT, Job, Outcome, add_arguments, chosen, machine, overrides_of, percent, run_all

from lockstep.config.load import load
from lockstep.envs.spiel.states import state_at
from lockstep.envs.spiel.text import question
from lockstep.evaluation.compare import Comparison, compare
from lockstep.evaluation.records import read_score, score_path
from lockstep.types import Score

RECIPE = ROOT / "recipes" / "envs" / "open_spiel_legal.yaml"
MEANING = {
    "listed": "the prompt lists the legal moves",
    "unlisted": "it does not, and has four examples (lr 2e-4)",
}
SHOWN = (
    ("connect_four", (3, 2, 3), "o4"),
    ("tic_tac_toe", (0, 4), "x(2,1)"),
    ("connect_four", (1, 1), "x0"),
    ("tic_tac_toe", (8,), "o(0,1)"),
)
"""Examples of prompts without a list. With one of each game the policy soon answers columns alone, in both games."""
NAME = "open_spiel_results"
SAMPLED = "sampled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "open_spiel_learning")
    parser.add_argument("--device", default="cpu", help="of the runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of table and plot")
    args = parser.parse_args()
    overrides = [*overrides_of(args), f"device={args.device}", f"threads={args.threads}"]
    jobs = [job(arm, seed, args.runs_dir, overrides) for arm in chosen(MEANING, args.only) for seed in args.seeds]
    outcomes = run_all(jobs, args.jobs, args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{NAME}.svg").write_text(plot(outcomes, MEANING) + "\n", encoding="utf-8")
    text = page(outcomes, machine(args.threads, args.jobs))
    (args.out / f"{NAME}.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def job(arm: str, seed: int, runs_dir: Path, overrides: Sequence[str]) -> Job:
    own = (f"name=open-spiel-{arm}-seed{seed}", f"seed={seed}", f"runs_dir={runs_dir}")
    return Job(arm, seed, (str(RECIPE), *(unlisted() if arm == "unlisted" else ()), *overrides, *own))


def unlisted() -> tuple[str, ...]:
    """What the recipe changes for prompts without a list of legal moves: the examples have none either, and are more."""
    examples = [
        {"user": question(state_at(game, history), game, "reply", show_moves=False)[0].content, "assistant": move}
        for game, history, move in SHOWN
    ]
    return ("task.show_moves=false", f"chat.examples={json.dumps(examples)}", "optimizer.lr=2e-4")


def page(outcomes: Sequence[Outcome], where: str) -> str:
    cases = sorted({case for outcome in outcomes for case in by_case(scores(outcome.job, SAMPLED)[0])})
    heads = [f"{case}, base → trained, %" for case in cases]
    return "\n".join(
        [
            "# Legal moves",
            "",
            "<!-- Written by benchmarks/open_spiel_learning.py. -->",
            "",
            f"`recipes/envs/open_spiel_legal.yaml`, {load(outcomes[0].job.args).steps} steps, SmolLM2-135M: share of legal "
            f"moves on {outcomes[0].comparison.n} held-out states, none of which is a state of training.",
            "",
            f"![Mean training reward by step]({NAME}.svg)",
            "",
            "The reward is 1 for a legal move and 0 for anything else. Mean over the seeds; bars reach from the lowest seed to "
            "the highest.",
            "",
            "| prompt | seed | greedy, base → trained, % | p | sampled at T = 1, base → trained, % | difference, points | p | "
            f"{' | '.join(heads)} | reward, last 5 steps | step, s |",
            "|" + "---|" * (9 + len(heads)),
            *(row(outcome, cases) for outcome in outcomes),
            "",
            f"By case: sampled. p is of the paired test of `lockstep compare`. {where}.",
            "",
            "To repeat: `python benchmarks/open_spiel_learning.py`.",
        ]
    )


def row(outcome: Outcome, cases: Sequence[str]) -> str:
    base, trained = scores(outcome.job, SAMPLED)
    greedy, sampled = outcome.comparison, compare(base, trained)
    before, after = by_case(base), by_case(trained)
    parts = [f"{percent(before[case])} → {percent(after[case])}" for case in cases]
    cells = [
        outcome.job.label,
        str(outcome.job.seed),
        f"{percent(greedy.base)} → {percent(greedy.trained)}",
        p_value(greedy),
        f"{percent(sampled.base)} → {percent(sampled.trained)}",
        f"{100 * sampled.difference:+.1f} [{100 * sampled.low:+.1f}, {100 * sampled.high:+.1f}]",
        p_value(sampled),
        *parts,
        f"{outcome.last(CURVE):.2f}",
        f"{outcome.training_seconds / load(outcome.job.args).steps:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def p_value(found: Comparison) -> str:
    return "< 0.0001" if found.p < 1e-4 else f"{found.p:.4f}"


def scores(job: Job, mode: str) -> tuple[Score, Score]:
    """Of the base and of the trained model."""
    base, trained = (read_score(score_path(job.folder, step, mode)) for step in (0, load(job.args).steps))
    return base, trained


def by_case(score: Score) -> dict[str, float]:
    """The share of legal replies of each case: an item's id begins with its case."""
    found: dict[str, list[bool]] = {}
    for result in score.results:
        if result.correct is not None:
            found.setdefault(result.id.partition("/")[0], []).append(result.correct)
    return {case: sum(marks) / len(marks) for case, marks in found.items()}


if __name__ == "__main__":
    main()
