"""`lockstep import`: converts a checkpoint of verl, OpenRLHF or TRL to a folder that train, eval and export accept."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `import FOLDER OUT`."""
    parser = subparsers.add_parser("import", help="take over a checkpoint of verl, OpenRLHF or TRL")
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="global_step_29, its actor/, ckpt/_actor, or checkpoint-100"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--step", type=int, metavar="N", help="which, in a folder of several steps")
    parser.add_argument(
        "--config", type=Path, metavar="DIR", help="folder with config.json and tokenizer, where FOLDER has none"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="round the weights (default: as they were saved)")


def run(args: argparse.Namespace) -> int:
    """Read, check against config.json, write. Raises CheckpointError for what is not whole or could run code."""
    from lockstep.export.import_checkpoint import import_checkpoint
    from lockstep.models.foreign import Kind, find_foreign

    found = find_foreign(args.folder, args.step)
    done = import_checkpoint(found, args.out, config=args.config, dtype=args.dtype)
    step = f" of step {done.step}" if done.step else ""
    print(f"{found.kind}{step} in {done.source} → {args.out}: {done.parameters:,} parameters in {done.dtype}")
    if done.left:
        print(f"left behind: {', '.join(done.left)} (only the program that wrote them can use them)")
    use = f"lockstep eval {args.out} --recipe RECIPE"
    if found.kind is Kind.ADAPTER:
        use = f"{use} model.path={done.base or 'BASE'}   (or adapter.start={args.out} to train on)"
    print(f"next: {use}")
    return 0
