"""`lockstep view`: serves a web page about runs, live while they train, on this machine only."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `view RUN [RUN …]`."""
    parser = subparsers.add_parser("view", help="browse curves, rollouts, settings and scores of runs, live")
    parser.add_argument(
        "runs", type=Path, metavar="RUN", nargs="+", help="run directory, of a run that is over or still going"
    )
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port on 127.0.0.1; by default a free one")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C. Raises RunDirectoryError for what is no run, MachineError without DuckDB or a port."""
    from lockstep.errors import MachineError

    try:
        import duckdb  # noqa: F401
    except ImportError as error:
        raise MachineError("DuckDB is not installed", where="view", fix="pip install 'lockstep-rl[view]'") from error
    from lockstep.view.api import Viewer
    from lockstep.view.server import Server

    viewer = Viewer(args.runs)
    try:
        with Server(viewer, args.port) as server:
            viewer.follow()
            print(
                f"open {server.address}\n(on this machine only; the address holds the token; Ctrl-C ends it)",
                flush=True,
            )
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                signal.signal(
                    signal.SIGINT, signal.SIG_IGN
                )  # a second Ctrl-C must not break off what closes, within seconds
                print()
    finally:
        viewer.close()
    return 0


def port(value: str) -> int:
    """Return the number of a port, as argparse asks for it."""
    number = int(value)
    if not 0 <= number < 2**16:
        raise argparse.ArgumentTypeError("must be from 0 to 65535")
    return number
