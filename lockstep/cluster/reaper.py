"""Ends the Ray of a run whose process was killed: Ray's own agents would live on for a minute, and its folder for ever.

Runs in a process of its own beside the run. It waits for the end of its standard input, which is the end of the run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def reaped(folder: str) -> Iterator[None]:
    """End every other process that has a file of `folder` open, and delete it: after the block, or if this process dies."""
    command = [sys.executable, "-P", "-m", __name__, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield


def main(folder: str) -> None:
    """Wait for the end of the run, then end its Ray."""
    spared = {os.getpid(), os.getppid()}  # the run's own process has Ray's files open, too
    os.read(sys.stdin.fileno(), 1)
    inside = folder + os.sep
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in spared and any(file.path.startswith(inside) for file in process.open_files()):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
