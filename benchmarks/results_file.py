"""The committed tables: a benchmark writes its own section of its file in benchmarks/results/, and leaves the others alone.

A section begins with a line `## NAME` and says which command made it, on which machine, with which versions, and when.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
HEAD = "## "


def machine(device: str) -> str:
    """Example: "NVIDIA H200, x86_64 with 16 CPU cores, Python 3.12.3"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{device}, {platform.machine()} with {cores} CPU cores, Python {platform.python_version()}"


def versions(names: Iterable[str]) -> str:
    """Of those that are installed. Example: "torch 2.11.0, vllm 0.24.0"."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def command(script: str, arguments: Sequence[str] | None = None) -> str:
    """What to type for the same table. Example: "python benchmarks/gpu_step.py --work lora --write"."""
    given = sys.argv[1:] if arguments is None else arguments
    return " ".join(["python", f"benchmarks/{Path(script).name}", *map(shlex.quote, given)])


def header(script: str, device: str, packages: Iterable[str], arguments: Sequence[str] | None = None) -> list[str]:
    """The first lines of a section."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return [command(script, arguments), f"{machine(device)}; {versions(packages)}; {date}"]


def write_section(file: Path, name: str, lines: Iterable[str]) -> None:
    """Replace the section `name` of a table file, or add it at the end."""
    found = sections(file.read_text() if file.is_file() else "")
    found[name] = "\n".join(lines).strip("\n")
    text = "".join(f"{HEAD}{title}\n\n{body}\n\n" if title else f"{body}\n\n" for title, body in found.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.rstrip("\n") + "\n")


def sections(text: str) -> dict[str, str]:
    """By name, in order; what stands before the first one has the name ""."""
    found: dict[str, str] = {}
    name, lines = "", list[str]()
    for line in [*text.splitlines(), HEAD]:
        if not line.startswith(HEAD):
            lines.append(line)
            continue
        if body := "\n".join(lines).strip("\n"):
            found[name] = body
        name, lines = line.removeprefix(HEAD).strip(), []
    return found
