"""Kills a run whose interpreter native code holds for too long: a process beside the run, started by its watchdog.

No thread of the run can do it. One of Python waits for the interpreter, and faulthandler's cannot tell such a hang from a process
that was stopped (SIGSTOP) and goes on. This process counts seconds only while the run is not stopped and it runs itself.

It is started as a file, by an interpreter without packages; so it imports the standard library alone.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

LOOK_S = 1.0


def main(run: int, place: str) -> None:
    """Read the seconds that process `run` may take until it writes again, and kill it if it does not; end with it."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run saves first, and ends this process then
        signal.signal(ignored, signal.SIG_IGN)
    allowed, waited = float("inf"), 0.0
    while os.getppid() == run:
        if select.select([0], [], [], LOOK_S)[0]:
            if not (lines := os.read(0, 1 << 16).split()):
                return
            allowed, waited = float(lines[-1]), 0.0
        elif not stopped(run):
            waited += LOOK_S
        if waited > allowed:
            _kill(run, place, waited)
            return


def stopped(process: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _kill(run: int, place: str, waited: float) -> None:
    with suppress(OSError):
        print(
            f"lockstep: {place}: native code has held the interpreter for {waited:.0f} s, so the run is killed; the stacks "
            f"of its threads are above\n  to fix: resume with `lockstep train --resume {place}`. If such times are normal, "
            "raise health.stall.least_s or set health.stall=warn",
            file=sys.stderr,
            flush=True,
        )
    with suppress(ProcessLookupError):
        os.kill(run, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
