"""Whether programs can be put into a sandbox here."""

from functools import cache

import pytest

from lockstep.envs.cells import Cells
from lockstep.errors import TaskError
from lockstep.verifiers.sandbox.isolation import Limits


@cache
def sandbox_refused() -> str:
    """Why there can be none; "" if there can."""
    try:
        Cells(["true"], [], Limits(60, 2**30, 2**24, 63))
    except TaskError as error:
        if "not permitted" in error.what or "Permission denied" in error.what or ": none for " in error.what:
            return error.what  # by the kernel
        raise
    return ""


def require_sandbox(isolation: str = "strict") -> str:
    """Skip the test, with the reason, where it cannot be had."""
    if isolation == "strict" and sandbox_refused():
        pytest.skip(sandbox_refused())
    return isolation
