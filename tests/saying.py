"""What `lockstep` says when it is called: in this process by the fixtures `said`, `told` and `printed`, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Said: TypeAlias = Callable[..., tuple[int, str, str]]
"""From the words of a command to its exit code, output and errors. Example: said("eval", run, "--no-base")"""
Told: TypeAlias = Callable[..., tuple[int, str]]
"""As Said, with output and errors in one text."""
Printed: TypeAlias = Callable[..., str]
"""From the words of a command that ends with `code` to its output; to its errors if that is not 0."""


def shell(*words: object) -> subprocess.CompletedProcess[str]:
    """Call it in a process of its own."""
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=900)
