"""Renders a chat template for the first time in a child process with limits, because a template is untrusted code.

Jinja's sandbox keeps a template from files and from Python, but not from endless loops or strings of many gigabytes.
"""

from __future__ import annotations

import os
import resource
import time
import warnings
from collections.abc import Callable

import psutil

CPU_SECONDS, WALL_SECONDS = 3, 60
MEMORY = 1 << 30
"""Bytes of address space that the child may take beyond what the process has already."""
LONGEST = 16_000_000
"""Characters of a rendered chat."""
_DONE, _TOO_LONG, _NO_MEMORY = 0, 3, 4


def beyond_limits(render: Callable[[], object]) -> str:
    """Render once in a forked child. Returns what it exceeded, "" if nothing; an error that it raises is not looked at.

    A child that waits instead of computing says nothing about the template, and is ended and passed over.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on forks with threads: the child runs Python code alone
        child = os.fork()
    if child == 0:
        _render_and_exit(render)
    deadline = time.monotonic() + WALL_SECONDS
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            deadline += WALL_SECONDS
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(status)
    if code == _TOO_LONG:
        return f"it renders more than {LONGEST:,} characters"
    if usage.ru_utime + usage.ru_stime >= CPU_SECONDS - 0.5:
        return f"it renders for more than {CPU_SECONDS} s"
    if code == _NO_MEMORY or (code < 0 and code != -9):
        return f"it takes more than {MEMORY >> 30} GiB of memory"
    return ""


def _render_and_exit(render: Callable[[], object]) -> None:
    code = _DONE  # also after an error of another kind: the caller meets it again, and tells it
    try:
        space = psutil.Process().memory_info().vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        code = _TOO_LONG if len(str(render())) > LONGEST else _DONE
    except MemoryError:
        code = _NO_MEMORY
    finally:
        os._exit(code)
