"""Makes the lock files of this folder with `uv` (pip install uv), for Linux, Python 3.11 and newer:

    python requirements/lock.py            resolve what changed in pyproject.toml; pins that still fit stay
    python requirements/lock.py --check    exit 1 if a lock file is not what that would write
    python requirements/lock.py --upgrade  take the versions of constraints.txt and of PINS again, the newest for the rest

A lock file names every package with its version and the SHA-256 of its files: pip install --require-hashes -r FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
CPU_TORCH = (
    "filelock",
    "typing-extensions>=4.10.0",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
    "setuptools",
)
"""What torch's builds for the CPU ask for. The builds themselves are on an index of their own and are installed first."""
GPU_RUN = ("torch==2.11.0", "transformers==5.17.0", "triton==3.6.0; sys_platform == 'linux'")
"""Versions that the results of docs/gpu_results.md were measured with."""


@dataclass(frozen=True)
class Lock:
    extras: tuple[str, ...]
    pins: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Packages that are left out."""

    def inputs(self) -> list[str]:
        """Every requirement that the lock file has to meet."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = [line for extra in self.extras for line in project["optional-dependencies"][extra]]
        return [*project["dependencies"], *extras, *self.pins]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.inputs(), self.without]).encode()).hexdigest()[:16]


LOCKS = {
    "cpu": Lock(("math", "trackers", "view"), CPU_TORCH, ("torch",)),
    "cuda": Lock(("math", "trackers", "view"), GPU_RUN),
    "cuda-vllm": Lock(
        ("math", "trackers", "view", "vllm"),
        (*GPU_RUN, "vllm==0.24.0; sys_platform == 'linux'", "uvloop<0.22"),  # newer ones give vLLM no event loop
    ),
}


def head(name: str) -> str:
    return f"# Made by requirements/lock.py for {name}; do not edit. Requirements: {LOCKS[name].digest()}\n"


def made(name: str, start: str) -> str:
    """Return the lock file that `uv` resolves; pins in `start` stay where they fit."""
    lock = LOCKS[name]
    with tempfile.TemporaryDirectory() as folder:
        asked, left_out, out = (Path(folder) / file for file in ("asked.in", "without.in", "out.lock"))
        asked.write_text("\n".join(lock.inputs()))
        left_out.write_text("\n".join(lock.without))
        out.write_text(start)
        command = ["uv", "pip", "compile", "-q", "--universal", "--python-version", "3.11", "--generate-hashes"]
        command += ["--no-header", "--no-annotate", "--no-config", "--default-index", "https://pypi.org/simple"]
        command += ["--excludes", str(left_out), str(asked), "-o", str(out)]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{name}: uv finds no solution\n{done.stderr}")
        return head(name) + out.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--upgrade", action="store_true")
    args = parser.parse_args()
    stale = []
    for name in LOCKS:
        path = HERE / f"{name}.lock"
        old = path.read_text() if path.exists() else ""
        new = made(name, old if old and not args.upgrade else (ROOT / "constraints.txt").read_text())
        if new != old:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    print(
        f"{'out of step' if args.check else 'written'}: {', '.join(stale)}" if stale else "all lock files are in step"
    )
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
