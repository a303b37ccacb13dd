"""`lockstep rollouts`: shows the rollouts of a run with their grades. Loads a tokenizer only for episodes and --seen."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.commands.eval import positive
from lockstep.config.load import load
from lockstep.errors import RunDirectoryError
from lockstep.track.text import block, one_line, reading_line
from lockstep.types import spans

if TYPE_CHECKING:
    from lockstep.config.schema import Chat, Recipe
    from lockstep.track.rollouts import RolloutRow
    from lockstep.types import Branch


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `rollouts RUN`."""
    parser = subparsers.add_parser("rollouts", help="print the replies of a step with their grades")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, metavar="N", help="which step; by default the last that is stored")
    parser.add_argument("--limit", type=positive, metavar="K", default=10, help="most replies to print (default 10)")
    add_seen(parser)
    only = parser.add_mutually_exclusive_group()
    for kind, text in (
        ("wrong", "only replies that are not correct"),
        ("right", "only correct replies"),
        ("unscored", "only replies without a score"),
    ):
        only.add_argument(f"--{kind}", dest="only", action="store_const", const=kind, help=text)


def add_seen(parser: argparse.ArgumentParser) -> None:
    """Register `--seen` of `rollouts` and `sample`."""
    what = "print each prompt as the model saw it: template, system text, examples, suffix"
    parser.add_argument("--seen", action="store_true", help=what)


def run(args: argparse.Namespace) -> int:
    """Print the replies. Raises RunDirectoryError if the run or the step is not there."""
    from lockstep.track.rollouts import read_rollouts, rollout_steps
    from lockstep.track.rundir import RunDirectory

    directory = RunDirectory.open(args.run)
    steps = rollout_steps(directory)
    step = args.step if args.step is not None or not steps else steps[-1]
    recipe = load([str(directory.recipe_path)])
    if recipe.loop == "sft" and not steps:
        raise RunDirectoryError(
            "a supervised run samples no replies in training, so it stores none",
            where=str(args.run),
            fix=f"sample replies: lockstep sample {args.run}, or read the rows: lockstep data show {directory.recipe_path}",
        )
    rows = read_rollouts(directory, 0 if step is None else step)
    wanted = [row for row in rows if args.only is None or word(row.right) == args.only]
    shown = wanted[: args.limit]
    decode = _decoder(recipe) if args.seen or any(_turns(row) or row.branches for row in shown) else None
    lines = [*(show(row, decode, seen=args.seen) for row in shown), summary(step, rows, wanted, args)]
    print("\n\n".join(lines) + ("" if args.seen else framing_note(recipe.chat)))
    return 0


def framing_note(chat: Chat) -> str:
    """Return a line about what the recipe puts around each question, for output that leaves it out; "" if that is nothing."""
    parts = [f"the suffix {one_line(chat.suffix, 60)!r}"] if chat.suffix else []
    parts += (
        [f"{len(chat.examples)} solved example{'s' if len(chat.examples) > 1 else ''} before it"]
        if chat.examples
        else []
    )
    parts += ["a system text"] if chat.system else []
    return f"\nthe model saw each question with {' and '.join(parts)}; --seen prints the whole prompt" if parts else ""


def _decoder(recipe: Recipe) -> Callable[[Sequence[int]], str]:
    """From ids to text, special tokens shown."""
    from lockstep.models.load import load_tokenizer
    from lockstep.models.resolve import resolve

    tokenizer = load_tokenizer(resolve(recipe.model))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _turns(row: RolloutRow | Branch) -> list[tuple[bool, int, int]]:
    """Return the stretches of an episode: sampled or not, first id, end; nothing for a single reply."""
    found = spans(row.trained)
    return found if len(found) > 1 else []


def word(right: bool | None) -> str:
    """right, wrong or unscored, as an evaluation counts it."""
    return {True: "right", False: "wrong", None: "unscored"}[right]


def counted(marks: Sequence[bool | None]) -> str:
    """Example: "3 right, 1 wrong, 0 unscored"."""
    return ", ".join(f"{sum(mark is kind for mark in marks)} {word(kind)}" for kind in (True, False, None))


def show(row: RolloutRow, decode: Callable[[Sequence[int]], str] | None = None, *, seen: bool = False) -> str:
    """Return one reply as text; nothing in it can act on the terminal.

    With `decode` an episode is shown turn by turn, what the model wrote apart from what it was told, and with `seen` the prompt
    as the model saw it.
    """
    reward = "none" if row.reward is None else f"{row.reward:g}"
    cut = "" if row.finish == "stop" else f", ended by {row.finish}"
    lines = [
        f"── {one_line(row.prompt_id, 60)} · sample {row.sample} · {word(row.right)} · reward {reward} · "
        f"advantage {row.advantage:+.3f}",
        f"   {reading_line(row.extracted, row.method, row.answer)}, {len(row.ids)} tokens{cut}, weights v{row.version}",
    ]
    lines += [f"   not scored: {one_line(row.error, 200)}"] if row.error else []
    turns = [block(message["role"], message["content"]) for message in row.messages]
    if seen and decode is not None:
        turns = [block("prompt, as the model saw it", decode(row.prompt_ids))]
    replies = _replies(row, decode)
    for number, branch in enumerate(row.branches, 2):
        start = "" if decode is None else decode(branch.prompt_ids)
        title = f"row {number} of the episode: its history was rewritten or forked"
        replies += [block(title, start), *_replies(branch, decode)]
    return "\n".join([*lines, *turns, *replies])


def _replies(row: RolloutRow | Branch, decode: Callable[[Sequence[int]], str] | None) -> list[str]:
    if decode is None or not (parts := _turns(row)):
        return [block("reply", row.text)]
    count, replies = 0, []
    for sampled, start, end in parts:
        count += sampled
        title = f"==> reply {count}, by the model" if sampled else "<== from the environment"
        replies.append(block(title, decode(row.ids[start:end])))
    return replies


def summary(
    step: int | None, rows: Sequence[RolloutRow], wanted: Sequence[RolloutRow], args: argparse.Namespace
) -> str:
    """Count the replies of each kind, and those shown."""
    shown = min(len(wanted), args.limit)
    of = f" of {len(wanted)} {args.only}" if args.only else f" of {len(rows)}"
    return f"step {step}: {len(rows)} replies, {counted([row.right for row in rows])}; shown {shown}{of}"
