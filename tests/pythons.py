"""Pythons with packages that this one does not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def python_with(folder: Path, *packages: str) -> str:
    """Make a Python that has these packages. Skips the test if they cannot be installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", *packages]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"{packages[0]} cannot be installed here: {made.stderr[-200:]}")
    return python
