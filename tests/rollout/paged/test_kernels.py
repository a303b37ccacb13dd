"""The Triton kernels, run by Triton's interpreter in a process of its own, against their plain torch twins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("part", ["layers", "attention", "sampling"])
def test_the_kernels_compute_what_plain_torch_does(part: str):
    script = Path(__file__).with_name("interpreted.py")
    root = Path(__file__).parents[3]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), part], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{part}: all equal"
