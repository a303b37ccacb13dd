"""Checks of a recipe by `lockstep doctor`, apart from those of the machine that the tests happen to run on."""

from __future__ import annotations

import contextlib
import io
import json

from lockstep.cli import main

MACHINE = [
    "imports", "versions", "shadows", "pip", "encoding", "temporary", "proxy", "model cache", "torch", "allocator", "lock",
    "attention", "uvloop", "python", "packages", "compiler", "threads", "load", "memory", "shared memory", "disk", "cache",
    "limits", "clock", "loopback",
]  # fmt: skip


def refused(*args: object) -> list[tuple[str, str]]:
    """Names and findings of the checks of `lockstep doctor ARGS` that fail, without those of the machine."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["doctor", *map(str, args), "--json"])
    checks = json.loads(out.getvalue())["checks"]
    failed = [check for check in checks if check["verdict"] == "fail"]
    assert code == bool(failed)
    return [(check["name"], check["found"]) for check in failed if check["name"] not in MACHINE]
