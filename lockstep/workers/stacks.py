"""Stack of a process, read from outside: it writes the lines it is at when it is asked to, even from within C code."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

ASKED = signal.SIGUSR1
NAME = "stacks"
"""Name of the file in memory that the stack is written to."""
SECONDS = 0.5
"""Longest wait for the stack."""


def write_when_asked() -> None:
    """Have this process write its main thread's stack whenever it gets ASKED."""
    faulthandler.register(ASKED, os.memfd_create(NAME), all_threads=False)


def line_of(pid: int, file: str) -> str:
    """Return the line of a file that a process runs now, "" if that cannot be told. Example: grader.py:7"""
    path, end = Path(file).expanduser(), time.monotonic() + SECONDS
    frame = re.compile(rf'File "(?:[^"]*/)?{re.escape(path.name)}", line (\d+) in ')
    with suppress(OSError):
        links = Path(f"/proc/{pid}/fd").iterdir()
        stack = next((link for link in links if str(link.readlink()) == f"/memfd:{NAME} (deleted)"), None)
        if stack is None:
            return ""
        os.kill(pid, ASKED)
        while time.monotonic() < end:
            if found := frame.search(stack.read_text(errors="replace")):  # the innermost comes first
                return f"{path}:{found[1]}"
            time.sleep(0.01)
    return ""
