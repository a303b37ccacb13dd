"""The result of a check of `lockstep doctor`, and functions that run and print a list of checks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lockstep.errors import DEFECT, LockstepError
from lockstep.text import reason_of

Verdict: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """Example: Check("threads", "warn", "OMP_NUM_THREADS = 64 on 16 cores", "export OMP_NUM_THREADS=16")"""

    name: str
    verdict: Verdict
    """warn: a run works, but worse than it could; fail: it would end in an error."""
    found: str
    fix: str = ""
    """The remedy; empty where there is nothing to do."""

    @staticmethod
    def failed(name: str, error: LockstepError) -> Check:
        """Return the failed check whose finding is an error."""
        what = "; ".join(getattr(error, "mistakes", [])) or error.what
        return Check(name, "fail", f"{error.where}: {what}" if error.where else what, error.fix)


Checking: TypeAlias = Callable[[], "Check | Sequence[Check]"]


def perform(checks: Iterable[tuple[str, Checking]]) -> Iterator[Check]:
    """Yield the results in order. A check that raises is itself a failed one: the others are still made."""
    for name, checking in checks:
        try:
            found = checking()
        except Exception as error:  # whatever it is, it is shown, and must not hide what the other checks find
            found = Check(name, "fail", f"the check itself failed: {reason_of(error)}", DEFECT)
        yield from [found] if isinstance(found, Check) else found


def failure_of(command: Sequence[str], seconds: float, what: str) -> str:
    """Run a program; returns the last line that it said if it failed, or how `what` ended, "" if it did not fail."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"{what} took more than {seconds:g} s"
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (said[-1] if said else f"{what} ended with {done.returncode}")


def worst(checks: Iterable[Check]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


def lines(check: Check) -> list[str]:
    """Return a check as text, its fix on a line of its own."""
    first = f"{check.verdict:<5} {check.name:<14} {check.found}"
    return [first, f"{'':<21}to fix: {check.fix}"] if check.fix else [first]
