"""What grading adds to a step: SmolLM2-135M trains a few steps with each kind of grader, and the share of the step is printed.

    python benchmarks/grading_share.py [--steps 4] [--threads 1] [--only math code] [--out benchmarks/results/grading_share.txt]

`time/grade` is all that a step does not do because of grading: reading replies, grading in the run's own process, and waiting
for the rest when sampling is over. Grading itself (`time/grade_work`) goes on in other processes while the engine samples. On a
CPU they take their time from the engine's cores, which this does not show; compare `time/rollout` of the kinds for that.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from training_runs import ROOT

from lockstep.config.load import load
from lockstep.loops.run import start_run
from lockstep.track.writer import StepRecord, read_metrics

OWN = """
def grade(prompt, reply):
    return float(prompt.answer in reply)
"""
PROGRAM = """\
  - user: "Write a function double(n) that returns 2 * n.\\nGive the program in one ```python block."
    assistant: "```python\\ndef double(n):\\n    return 2 * n\\n```"
"""
ANSWER = "{kind: math, fallback: last_line}"
"""Reads the last line where nothing is boxed, so that most replies have something to be compared."""
TRAINED = (
    "prompts_per_step=8",
    "samples_per_prompt=8",
    "rollout.slots=64",
    "eval.enabled=false",
    "save.every=1000",
    "device=cpu",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of grader: its name, its recipe, and what is changed there."""

    name: str
    recipe: str
    overrides: tuple[str, ...]


def kinds(folder: Path) -> tuple[Kind, ...]:
    own = folder / "own.py"
    own.write_text(OWN)
    chat = folder / "program.yaml"
    chat.write_text(
        f"chat:\n  examples:\n{PROGRAM.replace('  - ', '    - ').replace('    assistant', '      assistant')}"
    )
    return (
        Kind("numeric", "recipes/sums.yaml", ("task.verifier.kind=numeric", "rollout.max_tokens=48")),
        Kind("math", "recipes/sums.yaml", (f"task.verifier={ANSWER}", "rollout.max_tokens=48")),
        Kind(
            "own function",
            "recipes/sums.yaml",
            (f"task.verifier={{kind: python, path: '{own}:grade'}}", "rollout.max_tokens=48"),
        ),
        Kind("code", "recipes/code.yaml", (str(chat), "rollout.max_tokens=64")),
        Kind("tools", "recipes/envs/calculator.yaml", (f"task.questions.verifier={ANSWER}",)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="kinds, by the beginnings of their names")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of all recipes")
    parser.add_argument("--out", type=Path, help="store the table there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        for kind in kinds(folder):
            if args.only and not kind.name.startswith(tuple(args.only)):
                continue
            own = (
                f"name={kind.name.replace(' ', '_')}",
                f"runs_dir={folder}",
                f"steps={args.steps}",
                f"threads={args.threads}",
            )
            recipe = load([str(ROOT / kind.recipe), *kind.overrides, *TRAINED, *own, *args.set])
            rows.append(row(kind, read_metrics(start_run(recipe))))
    text = page(rows, args.threads)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


def row(kind: Kind, records: Sequence[StepRecord]) -> tuple[str, ...]:
    steps = [record.metrics for record in records if "time/grade_share" in record.metrics]

    def middle(name: str) -> float:
        return median(step[name] for step in steps)

    shares = [step["time/grade_share"] for step in steps]
    return (
        kind.name,
        f"{sum(step['batch/samples'] for step in steps):.0f}",
        f"{middle('time/step'):.2f}",
        f"{middle('time/rollout'):.2f}",
        f"{1e3 * middle('time/grade'):.1f}",
        f"{1e3 * middle('time/grade_work'):.1f}",
        f"{1e3 * max(step['time/grade_slowest'] for step in steps):.1f}",
        f"{median(shares):.2%}",
        f"{max(shares):.2%}",
    )


def page(rows: Sequence[Sequence[str]], threads: int) -> str:
    head = ("grader", "replies", "step s", "rollout s", "added ms", "work ms", "slowest ms", "share", "largest share")
    table = [head, *rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    where = f"{platform.processor() or platform.machine()}, {threads} thread(s), medians of the steps"
    return "\n".join([f"what grading adds to a step of SmolLM2-135M on a CPU: {where}", "", *lines])


if __name__ == "__main__":
    main()
