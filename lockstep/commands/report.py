"""`lockstep report`: writes the HTML report of a run. Does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `report RUN`."""
    parser = subparsers.add_parser("report", help="write report.html: curves, scores, warnings, samples of a run")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, of a run that is over or still going")


def run(args: argparse.Namespace) -> int:
    """Write the page and print where it is. Raises RunDirectoryError if there is no such run."""
    from lockstep.report.html import write_report

    print(write_report(args.run))
    return 0
