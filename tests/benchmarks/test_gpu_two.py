"""The benchmark of two GPUs, tried out on CPU workers with a tiny model: each part says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tiny(part: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_two.py"), "--tiny", "--part", part, "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_an_update_is_the_same_on_one_worker_and_on_two() -> None:
    found = tiny("equal")
    for other in ("one GPU again", "two GPUs"):
        assert f"one GPU and {other}: largest relative difference 0; bits of the weights equal" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rows"), [("sft", ("| one GPU | ", "| two GPUs | ")), ("exchange", ("messages alone: ",))]
)
def test_each_row_has_its_figures(part: str, rows: tuple[str, ...]) -> None:
    found = tiny(part)
    assert all(row in found for row in rows)
    assert "failed" not in found
