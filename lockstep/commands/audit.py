"""`lockstep audit parser`: shows the wrong replies of a score, and the answer that was read from each. Does not import torch."""

from __future__ import annotations

import argparse

from lockstep.errors import EvaluationError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `audit parser RUN|SCORE`."""
    parser = subparsers.add_parser("audit", help="read the wrong replies of a score: were they wrong, or read wrongly?")
    actions = parser.add_subparsers(dest="action", metavar="AUDIT", required=True)
    audit = actions.add_parser(
        "parser", help="fifty wrong replies with extraction, method and truncation; boxed rate, ceiling"
    )
    audit.add_argument(
        "score", metavar="SCORE|RUN|FOLDER[@STEP]", help="a score's file, or a run: its last greedy score"
    )
    audit.add_argument(
        "--mode", metavar="MODE", help="of a run: the mode whose score is read, by the beginning of its label"
    )
    audit.add_argument("-n", type=int, default=50, metavar="N", help="how many wrong replies (default 50)")


def run(args: argparse.Namespace) -> int:
    """Print the audit. Raises EvaluationError (7) for what is no score."""
    from lockstep.evaluation.audit import audit_parser, text_of
    from lockstep.evaluation.collect import newest, records_of
    from lockstep.evaluation.records import read_score
    from lockstep.evaluation.table import score_line

    if args.n < 1:
        raise EvaluationError(f"-n {args.n}: nothing would be shown", fix="set -n to 1 or more")
    records = newest(records_of(args.score))
    chosen = [record for record in records if record.key[1].startswith(args.mode or "")]
    if not chosen:
        modes = ", ".join(sorted({record.key[1] for record in records}))
        raise EvaluationError(
            f"there is no score of mode {args.mode}", where=args.score, fix=f"choose one with --mode: {modes}"
        )
    record = min(chosen, key=lambda one: (not one.key[1].startswith("greedy"), one.path))
    score = read_score(record.path)
    print(f"{record.label}, {record.key[1]} of {record.key[0]}: {score_line(score)}")
    print("\n".join(text_of(score, audit_parser(score, args.n))))
    return 0
