"""`lockstep metrics`: explains the metrics of a run. Does not import torch."""

from __future__ import annotations

import argparse

from lockstep.config.foreign_settings import SYSTEMS
from lockstep.config.metric import MetricInfo, named_elsewhere
from lockstep.track.catalogue import all_metrics, explain, find, healthy_text, metrics_markdown
from lockstep.track.text import plain_table


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `metrics explain|list`."""
    parser = subparsers.add_parser("metrics", help="explain the numbers of a run: meaning, unit, healthy range, remedy")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    one = actions.add_parser("explain", help="all about one metric")
    one.add_argument(
        "name",
        nargs="+",
        metavar="NAME",
        help="as in metrics.jsonl, or of verl, OpenRLHF, TRL. Example: grad/norm, pg_loss",
    )
    every = actions.add_parser("list", help="all metrics, one a line")
    every.add_argument("prefix", nargs="?", default="", help="only names that start with this")
    every.add_argument("--markdown", action="store_true", help="print the page docs/metrics.md")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for. Raises ConfigError for a name that does not exist."""
    match args.action:
        case "explain":
            print("\n\n".join(_explained(name) for name in args.name))
        case "list" if args.markdown:
            print(metrics_markdown(), end="")
        case "list":
            infos = [info for info in all_metrics() if info.name.startswith(args.prefix)]
            rows = [(info.name, info.unit, info.meaning) for info in infos]
            one = "" if rows else describe(args.prefix, explain(args.prefix))
            print(one or plain_table("", ("name", "unit", "meaning"), rows))
    return 0


def _explained(name: str) -> str:
    """Return what is known of a metric of ours, or of another system and then of ours."""
    there = [] if find(name) else list(named_elsewhere(name))
    if not there:
        return describe(name, explain(name))
    lines = []
    for system, known, one in there:
        lines += [f"{known} of {SYSTEMS[system]}: {one.means}", f"  here {one.ours}: {one.differs or 'the same'}"]
    ours = dict.fromkeys(one.ours for _, _, one in there)
    return "\n".join([*lines, *(describe(name, explain(name)) for name in ours)])


def describe(name: str, info: MetricInfo) -> str:
    """Everything that is known of a metric, a line each."""
    lines = [f"{name}  ({info.unit})" if info.unit != "–" else name]
    lines += [f"  described as {info.name}"] if info.name != name else []
    lines += [f"  {info.meaning}", f"  healthy: {healthy_text(info)}"]
    return "\n".join([*lines, f"  if not:  {info.advice}"] if info.advice else lines)
