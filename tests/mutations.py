"""Known mistakes (mutations.toml), put into a copy of the package one by one: the fast tests must notice each.

`python -m tests.mutations [WORD …]` runs those whose line contains one of the words, all without one. A mistake is found by its
text, wherever the file lies; text that is not there exactly once is an error, to be mended in mutations.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("lockstep", "tests", "recipes", "benchmarks", "docs")
WORKERS = int(os.environ.get("WORKERS", "2"))


class Mutation(NamedTuple):
    breaks: str
    """What the mistake takes away."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or folders below tests/; FILE::WORD for those tests of a file whose names contain the word."""


def mutations() -> list[Mutation]:
    table = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text(encoding="utf-8"))
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in table["mutation"]]


def texts_of(root: Path) -> dict[Path, str]:
    """The package's files."""
    return {path: path.read_text(encoding="utf-8") for path in sorted((root / "lockstep").rglob("*.py"))}


def place_of(mutation: Mutation, texts: dict[Path, str]) -> Path:
    """The one file that holds the text. Raises ValueError if there is none, or if it is there more than once."""
    places = [path for path, text in texts.items() for _ in range(text.count(mutation.old))]
    if len(places) != 1:
        raise ValueError(f"{mutation.breaks}: its text is in the package {len(places)} times: {mutation.old!r}")
    return places[0]


def caught_by(mutation: Mutation, root: Path) -> str:
    """The first test that fails in the copy at `root` with this mistake; "" if none does."""
    path = place_of(mutation, texts_of(root))
    text = path.read_text(encoding="utf-8")
    try:
        _write(path, text.replace(mutation.old, mutation.new))
        for chosen in mutation.tests:
            if test := _first_failure(root, chosen):
                return test
        return ""
    finally:
        _write(path, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):  # its time stamp has whole seconds
        compiled.unlink()


def _first_failure(root: Path, chosen: str) -> str:
    file, _, word = chosen.partition("::")
    options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no", *(["-k", word] if word else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"tests/{file}"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "LOCKSTEP_CACHE": str(ROOT / ".cache" / "lockstep")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1, 2):  # 2: an error at import, which no user could miss either
        raise RuntimeError(f"pytest {chosen}: {done.stdout}{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if done.returncode else ""


def main(words: Sequence[str]) -> int:
    chosen = [m for m in mutations() if not words or any(word in f"{m.breaks} {m.tests}" for word in words)]
    for mutation in chosen:
        place_of(mutation, texts_of(ROOT))
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        for number in range(WORKERS):
            copy = Path(folder) / str(number)
            for name in COPIED:
                shutil.copytree(ROOT / name, copy / name)
            for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.txt"), ROOT / "Makefile"):
                shutil.copy(path, copy)
            copies.put(copy)

        def in_a_copy(work: Callable[[Path], str]) -> str:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        named = sorted({test for mutation in chosen for test in mutation.tests})
        for failure in pool.map(lambda test: in_a_copy(partial(_first_failure, chosen=test)), named):
            if failure:
                raise RuntimeError(f"this fails without any mistake: {failure}")
        caught = pool.map(lambda mutation: in_a_copy(partial(caught_by, mutation)), chosen)
        survived = 0
        for mutation, test in zip(chosen, caught, strict=True):
            survived += not test
            print(f"{'caught  ' if test else 'SURVIVED'}  {mutation.breaks}  {test.partition(' ')[2]}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
