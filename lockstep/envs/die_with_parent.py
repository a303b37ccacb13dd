"""Runs a command that is killed when the process that started it ends: python die_with_parent.py COMMAND…

This process is a session leader whose standard input is a pipe from its parent. When the pipe closes or the command ends, it
writes the command's last output, and kills the command with all processes that this has started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main() -> None:
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert command.stdout is not None
    output, tail = command.stdout.fileno(), b""
    watched = [0, output]
    while True:
        ready, _, _ = select.select(watched, [], [], 0.2)
        if output in ready:
            data = os.read(output, 65536)
            tail = (tail + data)[-2000:]
            if not data:
                watched.remove(output)
        if 0 in ready or (output not in ready and command.poll() is not None):
            break
    try:
        os.write(1, tail)
    finally:  # its reader may be gone
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
