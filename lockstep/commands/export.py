"""`lockstep export`: writes a checkpoint for transformers, PEFT, vLLM or llama.cpp, and verifies that it is the trained model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from lockstep.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `export CKPT OUT`."""
    parser = subparsers.add_parser(
        "export", help="write a checkpoint as a verified Hugging Face folder, or a GGUF file"
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="run directory, checkpoint (runs/x/checkpoints/step_000010), or adapter's folder",
    )
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="a new folder (default: one in the cache)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--merge", action="store_true", help="a plain model, adapters merged in (the default)")
    kind.add_argument(
        "--adapter", action="store_true", help="the adapter alone, in PEFT's layout, for the original base"
    )
    parser.add_argument("--format", choices=("hf", "gguf"), default="hf", help="gguf: one merged file for llama.cpp")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint of a run (default: the newest); 0 is its base"
    )
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="largest file of weights (default 5)")
    parser.add_argument("--again", action="store_true", help="make an export again that is whole, or replace another")
    parser.add_argument(
        "--recipe", nargs="+", default=[], metavar="RECIPE", help="for a checkpoint outside of its run, or an adapter"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="override a setting, such as device=cpu"
    )


def run(args: argparse.Namespace) -> int:
    """Write and verify. Raises ExportError if the outcome is not the trained model."""
    gguf = args.format == "gguf"
    if gguf and args.adapter:
        raise ConfigError(
            ["--format gguf and --adapter cannot be used together: a GGUF file holds a merged model"],
            fix="leave one of them out",
        )
    if not 0 < args.shard_gb < math.inf:
        raise ConfigError([f"--shard-gb {args.shard_gb:g} is not a file size: it must be above 0"])
    from lockstep.export.export import choice_note, export
    from lockstep.scoring.targets import find_target

    if note := choice_note(args.checkpoint, args.step):
        print(note)
    target = find_target(args.checkpoint, args.recipe, args.set, args.step)
    for note in target.notes:
        print(f"warning: {note}")
    shard = int(args.shard_gb * 1e9)
    done = export(target, args.out, adapter=args.adapter, gguf=gguf, shard_bytes=shard, again=args.again)
    if done.reused:
        print("it is there already, every file whole: not made again (--again makes it)")
    print(f"{target.label} → {done.path}: {done.kind} in {done.dtype}, {done.bytes / 1e6:,.1f} MB of tensors")
    print(done.verified.line)
    for change in done.config_changes:
        print(f"config.json is the base's own but for {change}")
    if done.verified.equals_base and target.step:
        print(
            f"warning: {target.step} steps of training changed nothing that the probe can see: the export equals the base"
        )
    return 0
