"""`lockstep compare`: compares two existing scores, runs or folders of scores, item by item. Does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.evaluation.collect import Pair, Record
    from lockstep.evaluation.compare import Comparison
    from lockstep.types import ItemResult


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `compare A [B]`."""
    parser = subparsers.add_parser("compare", help="say whether two scores differ, item by item, and how sure that is")
    parser.add_argument(
        "scores", nargs="+", metavar="SCORE|RUN|FOLDER[@STEP]",
        help="a score's file, a run (its last scores) or a folder of scores; one run alone is its base against its last",
    )  # fmt: skip
    parser.add_argument("--items", action="store_true", help="list the items that rose and fell")
    parser.add_argument("--all-steps", action="store_true", help="pair every step of the two, not the last alone")
    parser.add_argument("--estimate", metavar="NAME", help="compare this number alone. Example: pass@8")
    parser.add_argument(
        "--allow-mismatch", action="store_true", help="compare scores measured under different conditions, and say so"
    )


def run(args: argparse.Namespace) -> int:
    """Compare and print. Raises EvaluationError (7) for scores that may not be compared, are damaged or none."""
    pairs, left_out = find_pairs(args.scores, all_steps=args.all_steps)
    having = [one for one in pairs if args.estimate in (None, *numbers_of(one))]
    lacking = [one for one in pairs if one not in having] if having else []  # of none, compare_pair says what there is
    pairs = having or pairs
    verdicts = []
    for one in pairs:
        comparisons = compare_pair(one, args.allow_mismatch, args.estimate)
        verdicts.append(comparisons[0].verdict)
        print("\n".join(lines_of(one, comparisons, items=args.items)) + "\n")
    if len(pairs) > 1:
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        print(
            f"{len(pairs)} comparisons: {counts}. If nothing had changed, {0.05 * len(pairs):.1f} would look like effects."
        )
    for record in left_out:
        print(f"left out, without a partner: {record.path}")
    for one in lacking:
        print(f"left out, without {args.estimate}: {one.before.path} and {one.after.path}")
    return 0


def find_pairs(names: Sequence[str], *, all_steps: bool = False) -> tuple[list[Pair], list[Record]]:
    """Pair the scores; also return those without a partner. Raises ConfigError unless one or two are named."""
    from lockstep.evaluation.collect import base_and_last, newest, pair, records_of, unpaired

    if len(names) > 2:
        raise ConfigError(
            [f"{len(names)} scores were given, but a comparison needs two"], fix="give two: lockstep compare A B"
        )
    sides = [records_of(name) for name in names]
    if len(sides) == 1:
        if all_steps:
            what = "--all-steps pairs the steps of two runs, but one was given"
            raise ConfigError([what], fix=f"give two, or name the step: lockstep compare {names[0]}@0 {names[0]}@STEP")
        return base_and_last(sides[0]), []
    before, after = sides if all_steps else [newest(side) for side in sides]
    pairs = pair(before, after, by_step=all_steps)
    return pairs, unpaired(before, after, pairs)


def compare_pair(one: Pair, allow_mismatch: bool, estimate: str | None) -> list[Comparison]:
    """Return the comparison of each number that both have, the headline first."""
    from lockstep.evaluation.compare import compare

    a, b = one.before.brief, one.after.brief
    names = [estimate] if estimate else numbers_of(one)
    return [compare(a, b, allow_mismatch, name) for name in names or [a.marks.names[0]]]


def numbers_of(one: Pair) -> list[str]:
    """Return the numbers that both scores have, in the order of the first."""
    return [name for name in one.before.brief.marks.names if name in one.after.brief.marks.names]


def lines_of(one: Pair, comparisons: Sequence[Comparison], *, items: bool) -> list[str]:
    """Lines about a pair of scores."""
    from lockstep.evaluation.alarms import untrained_alarm
    from lockstep.evaluation.compare import differences, power_line
    from lockstep.evaluation.table import score_line

    a, b = one.before.brief.score, one.after.brief.score
    first = comparisons[0]
    lines = [
        f"{b.conditions.task}, {b.conditions.mode}",
        f"  A {one.before.label}: {score_line(a)}",
        f"  B {one.after.label}: {score_line(b)}",
        *(f"  {sentence(comparison)}" for comparison in comparisons),
        f"  {power_line(first)}",
        f"  {first.changed_texts} of {first.texts} replies differ in their text",
    ]
    if first.dropped:
        lines.append(f"  {first.dropped} items left out: unscored or missing in one of the two")
    if first.mismatched:
        lines.append(f"  conditions differ: {differences(a.conditions, b.conditions)}")
    alarms = [first.warning, "" if first.mismatched else untrained_alarm(a, b)]
    lines += [f"  alarm: {alarm}" for alarm in alarms if alarm]
    return lines + (item_lines(one, first) if items else [])


def sentence(c: Comparison) -> str:
    """Example: "pass@1: +3.0 points [-1.5, +7.4], 12 rose, 6 fell, p = 0.24 (McNemar, exact): no effect shown" """
    from lockstep.evaluation.compare import Verdict

    test = "McNemar, exact" if c.test == "mcnemar-exact" else "sign-flip test"
    p = f"p = {c.p:.2g}" if c.p >= 1e-4 else "p < 0.0001"
    end = ""
    if c.verdict is Verdict.NO_EFFECT:
        end = f"; {unseen(c)}"
    if c.verdict is Verdict.CONDITIONS:
        end = ": it is of the conditions and the weights together, and says nothing about the weights alone"
    return (
        f"{c.estimate}: {100 * c.difference:+.1f} points [{100 * c.low:+.1f}, {100 * c.high:+.1f}], {c.c} rose, {c.b} fell, "
        f"{p} ({test}): {c.verdict}{end}"
    )


def unseen(c: Comparison) -> str:
    """Say how large a difference may exist although none is shown."""
    from lockstep.evaluation.intervals import wilson

    if c.b + c.c == 0:  # resampling what never changed gives no interval
        return f"up to {wilson(0, c.n).high:.0%} of items may change and none of {c.n} show it"
    return f"a true difference from {100 * c.low:+.1f} to {100 * c.high:+.1f} points would fit"


def item_lines(one: Pair, c: Comparison) -> list[str]:
    """Return the items that changed, with what was read before and after."""
    from lockstep.evaluation.records import read_score
    from lockstep.track.text import plain_table

    before, after = ({r.id: r for r in reversed(read_score(side.path).results)} for side in (one.before, one.after))
    rows = [
        (kind, id, before[id].answer, _read_as(before[id]), _read_as(after[id]))
        for kind, ids in (("rose", c.rose), ("fell", c.fell))
        for id in ids
    ]
    return (
        plain_table("", ("", "item", "answer", "A read", "B read"), rows).split("\n") if rows else ["  no item changed"]
    )


def _read_as(result: ItemResult) -> str:
    from lockstep.track.text import one_line

    found = "nothing" if result.extracted is None else one_line(result.extracted, 40)
    return found + (" (cut off)" if result.truncated else "")
