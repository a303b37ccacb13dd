"""`lockstep rollouts`: read what a run sampled, with its grade. Loads no torch."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.track.text import one_line, visible

if TYPE_CHECKING:
    from lockstep.track.rollouts import RolloutRow


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `rollouts RUN`."""
    parser = subparsers.add_parser("rollouts", help="print the replies of a step with their grades")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, metavar="N", help="which step; by default the last that is stored")
    parser.add_argument("--limit", type=_positive, metavar="K", default=10, help="at most so many replies (default 10)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--wrong", dest="only", action="store_const", const="wrong", help="only replies that are not correct"
    )
    only.add_argument("--right", dest="only", action="store_const", const="right", help="only correct replies")
    only.add_argument(
        "--unscored", dest="only", action="store_const", const="unscored", help="only replies without a score"
    )


def run(args: argparse.Namespace) -> int:
    """Print the replies. Raises RunDirectoryError if the run or the step is not there."""
    from lockstep.track.rollouts import read_rollouts, rollout_steps
    from lockstep.track.rundir import RunDirectory

    directory = RunDirectory.open(args.run)
    steps = rollout_steps(directory)
    step = args.step if args.step is not None or not steps else steps[-1]
    rows = read_rollouts(directory, 0 if step is None else step)
    wanted = [row for row in rows if args.only is None or word(row) == args.only]
    print("\n\n".join([*(show(row) for row in wanted[: args.limit]), summary(step, rows, wanted, args)]))
    return 0


def word(row: RolloutRow) -> str:
    """right, wrong or unscored."""
    return {True: "right", False: "wrong", None: "unscored"}[row.right]


def show(row: RolloutRow) -> str:
    """One reply as text; nothing in it can act on the terminal."""
    reward = "none" if row.reward is None else f"{row.reward:g}"
    cut = "" if row.finish == "stop" else f", ended by {row.finish}"
    found = "nothing" if row.extracted is None else repr(one_line(row.extracted, 80))
    how = f" by {one_line(row.method, 40)}" if row.method else ""
    lines = [
        f"── {one_line(row.prompt_id, 60)} · sample {row.sample} · {word(row)} · reward {reward} · "
        f"advantage {row.advantage:+.3f}",
        f"   extracted {found}{how}, answer {one_line(row.answer, 80)!r}, {len(row.ids)} tokens{cut}, weights v{row.version}",
    ]
    lines += [f"   not scored: {one_line(row.error, 200)}"] if row.error else []
    turns = [_block(message["role"], message["content"]) for message in row.messages]
    return "\n".join([*lines, *turns, _block("reply", row.text)])


def summary(
    step: int | None, rows: Sequence[RolloutRow], wanted: Sequence[RolloutRow], args: argparse.Namespace
) -> str:
    """How many replies there are of each kind, and how many were shown."""
    counts = ", ".join(f"{sum(word(row) == kind for row in rows)} {kind}" for kind in ("right", "wrong", "unscored"))
    shown = min(len(wanted), args.limit)
    of = f" of {len(wanted)} {args.only}" if args.only else f" of {len(rows)}"
    return f"step {step}: {len(rows)} replies, {counts}; shown {shown}{of}"


def _block(title: str, content: str) -> str:
    return f"   {one_line(title, 20)}:\n" + textwrap.indent(visible(content), "     │ ", lambda line: True)


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
